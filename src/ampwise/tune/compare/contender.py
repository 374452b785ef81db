"""One precision at the shared model: its training step, and what is put on the model while it has its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

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
        self._counts = True
        self.forget_steps()

    @property
    def is_base(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.label == BASE

    @property
    def skipped(self) -> int:
        """Counted steps without an update: the scaler had found gradients that are not finite. Waits for the device.

        A fused optimizer is called all the same, and looks itself whether it has been found so.
        """
        return self._calls - self._updates + sum(float(found) > 0 for found in self._found)

    def again(self) -> Contender:
        """The same once more, to see how far two runs of the same are apart."""
        entry = Entry(self.precision, self.compiled)
        return Contender(entry, self.step, around=self._around, label=f"{self.label} {AGAIN}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The model is this contender's: it computes as this one wants it."""
        hook = self.step.optimizer.register_step_post_hook(self._updated)
        try:
            with self._around(), _or_fail() if self.compiled else nullcontext():
                yield
        finally:
            hook.remove()

    def __call__(self) -> Tensor:
        self._calls += 1
        return self.step()

    def uncounted(self) -> Tensor:
        """A step that is not timed either."""
        self._counts = False
        try:
            return self.step()
        finally:
            self._counts = True

    def forget_steps(self) -> None:
        """Count from here on: while a scale is being found, steps are skipped as a matter of course."""
        self._calls = self._updates = 0
        self._found: list[Tensor] = []

    def _updated(self, optimizer: Optimizer, *_: object) -> None:
        if self._counts:
            self._updates += 1
            found = getattr(optimizer, "found_inf", None)  # torch's scaler puts it there for one that is fused
            self._found += [] if found is None else [found.detach()]


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


def _or_fail() -> AbstractContextManager[object]:
    """Where torch.compile has compiled the same code too often it goes on without: not what a row says it is."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = next(name for name in ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit") if hasattr(config, name))
    return cast("AbstractContextManager[object]", config.patch({name: True}))


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
