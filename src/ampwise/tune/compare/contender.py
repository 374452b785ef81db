"""One precision on the shared model: its training step, and what is installed on the model during its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.precision.policy import Policy
from ampwise.tune.compare.float8 import FP8, OTHER_LAYERS, Float8Layers
from ampwise.tune.compare.plan import PlannedRow
from ampwise.tune.compare.speeds import BASE, PrecisionRow
from ampwise.tune.train_case import TrainCase
from ampwise.tune.training_step import TrainingStep
from ampwise.watch.time_use import HALVES

__all__ = ["AGAIN", "Contender", "make_contenders", "parse_keep"]

AGAIN = "again"


class Contender:
    """Train steps in one precision, taking turns with others that share the model and optimizer."""

    def __init__(
        self,
        entry: PlannedRow,
        step: TrainingStep,
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        label: str | None = None,
    ) -> None:
        self.precision, self.compiled = entry
        self.label = label or PrecisionRow(precision=entry.precision, compiled=entry.compiled).label
        self.step = step
        self._installed = around
        self._counts = True
        self.forget_steps()

    @property
    def is_base(self) -> bool:
        """Whether the others are compared with this one."""
        return self.label == BASE

    @property
    def skipped(self) -> int:
        """Count the steps without an update, because the scaler found gradients that are not finite. Syncs the device.

        A fused optimizer is called even then, and reads the scaler's flag itself.
        """
        return self._calls - self._updates + sum(float(found) > 0 for found in self._found)

    def again(self) -> Contender:
        """Return a second contender that repeats this one, to measure the noise between two equal runs."""
        entry = PlannedRow(self.precision, self.compiled)
        return Contender(entry, self.step, around=self._installed, label=f"{self.label} {AGAIN}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Set up the model for this contender while inside."""
        hook = self.step.optimizer.register_step_post_hook(self._updated)
        try:
            with self._installed(), _fail_on_recompile_limit() if self.compiled else nullcontext():
                yield
        finally:
            hook.remove()

    def __call__(self) -> Tensor:
        self._calls += 1
        return self.step()

    def uncounted(self) -> Tensor:
        """Run a step that is neither counted nor timed."""
        self._counts = False
        try:
            return self.step()
        finally:
            self._counts = True

    def forget_steps(self) -> None:
        """Start counting from here: while the loss scale settles, skipped steps are normal."""
        self._calls = self._updates = 0
        self._found: list[Tensor] = []

    def _updated(self, optimizer: Optimizer, *_: object) -> None:
        if self._counts:
            self._updates += 1
            found = getattr(optimizer, "found_inf", None)  # torch's scaler sets it on a fused optimizer
            self._found += [] if found is None else [found.detach()]


def make_contenders(
    entries: Sequence[PlannedRow],
    case: TrainCase,
    optimizer: Optimizer,
    *,
    clip_norm: float | None,
    kept: Sequence[str] = (),
) -> list[Contender]:
    """Make a contender for each entry; ``kept`` are patterns of modules that 16-bit precisions run in FP32."""
    return [_contender(entry, case, optimizer, clip_norm, kept) for entry in entries]


def _contender(
    entry: PlannedRow, case: TrainCase, optimizer: Optimizer, clip_norm: float | None, kept: Sequence[str]
) -> Contender:
    policy = Policy(OTHER_LAYERS if entry.precision == FP8 else entry.precision)
    if kept and entry.precision in HALVES:
        policy = policy.keep(BASE, *kept)
        policy.modules(case.model)  # report a pattern that matches nothing now, not halfway through
    step = TrainingStep(case, policy, optimizer, clip_norm=clip_norm, compiled=entry.compiled)
    around = Float8Layers(case.model, step.in_place).on if entry.precision == FP8 else step.in_place
    return Contender(entry, step, around=around)


def _fail_on_recompile_limit() -> AbstractContextManager[object]:
    """Make torch.compile fail at its recompile limit: by default it goes on uncompiled, and the row would be wrong."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = next(name for name in ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit") if hasattr(config, name))
    return cast("AbstractContextManager[object]", config.patch({name: True}))


def parse_keep(given: Sequence[str]) -> tuple[str, ...]:
    """Parse the patterns of ``--keep fp32=PATTERN``.

    >>> parse_keep(["fp32=*.head"])
    ('*.head',)
    """
    patterns = []
    for text in given:
        precision, equals, pattern = text.partition("=")
        if precision != BASE or not equals or not pattern:
            raise BadInput(f"--keep {text}: expected fp32=PATTERN, such as fp32=*.router.")
        patterns.append(pattern)
    return tuple(patterns)
