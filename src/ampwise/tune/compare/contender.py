"""One precision at the shared model: its training step, and what is put on the model while it has its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from ampwise.engine.precision.policy import Policy
from ampwise.errors import BadInput
from ampwise.evidence.speed import BASE, Row
from ampwise.evidence.timing import HALVES
from ampwise.tune.compare.float8 import AROUND, FP8, Float8Layers
from ampwise.tune.compare.planning import Entry
from ampwise.tune.step import TrainingStep
from ampwise.tune.subject import Subject

__all__ = ["AGAIN", "Contender", "contenders", "kept_patterns"]

AGAIN = "again"


class Contender:
    """Something that trains a step, in turns with others that share its model and optimizer."""

    def __init__(
        self,
        entry: Entry,
        step: TrainingStep,
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        label: str | None = None,
    ) -> None:
        self.precision, self.compiled = entry
        self.label = label or Row(precision=entry.precision, compiled=entry.compiled).label
        self.step = step
        self._around = around
        self._calls = self._updates = 0

    @property
    def is_base(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.label == BASE

    @property
    def skipped(self) -> int:
        """Steps in which the optimizer was not called: the scaler had found gradients that are not finite."""
        return self._calls - self._updates

    def again(self) -> Contender:
        """The same once more, to see how far two runs of the same are apart."""
        entry = Entry(self.precision, self.compiled)
        return Contender(entry, self.step, around=self._around, label=f"{self.label} {AGAIN}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The model is this contender's: it computes as this one wants it."""
        hook = self.step.optimizer.register_step_post_hook(self._updated)
        try:
            with self._around():
                yield
        finally:
            hook.remove()

    def __call__(self) -> Tensor:
        self._calls += 1
        return self.step()

    def forget_steps(self) -> None:
        """Count from here on: while a scale is being found, steps are skipped as a matter of course."""
        self._calls = self._updates = 0

    def _updated(self, *_: object) -> None:
        self._updates += 1


def contenders(
    entries: Sequence[Entry],
    subject: Subject,
    optimizer: Optimizer,
    *,
    clip_norm: float | None,
    kept: Sequence[str] = (),
) -> list[Contender]:
    """One for each entry; ``kept`` are patterns of modules that those of 16 bits run in FP32."""
    return [_contender(entry, subject, optimizer, clip_norm, kept) for entry in entries]


def _contender(
    entry: Entry, subject: Subject, optimizer: Optimizer, clip_norm: float | None, kept: Sequence[str]
) -> Contender:
    policy = Policy(AROUND if entry.precision == FP8 else entry.precision)
    if kept and entry.precision in HALVES:
        policy = policy.keep(BASE, *kept)
        policy.modules(subject.model)  # a pattern that matches nothing is an error now, and not in the middle
    step = TrainingStep(subject, policy, optimizer, clip_norm=clip_norm, compiled=entry.compiled)
    around = Float8Layers(subject.model, step.in_place).on if entry.precision == FP8 else step.in_place
    return Contender(entry, step, around=around)


def kept_patterns(given: Sequence[str]) -> tuple[str, ...]:
    """The patterns of ``--keep fp32=PATTERN``.

    >>> kept_patterns(["fp32=*.head"])
    ('*.head',)
    """
    patterns = []
    for text in given:
        precision, equals, pattern = text.partition("=")
        if precision != BASE or not equals or not pattern:
            raise BadInput(f"--keep {text}: expected is fp32=PATTERN, such as fp32=*.router.")
        patterns.append(pattern)
    return tuple(patterns)
