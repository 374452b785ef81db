"""Learning-rate schedulers that move with the steps that were taken, and stand still on those that were skipped.

Whether a step was skipped is known on the device first. The rate is not needed before the next step: the
schedulers wait until then, by when the news has arrived, so that nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.engine.scaling.outcome import Outcome
from ampwise.errors import BadInput

__all__ = ["Schedules"]


class Schedules:
    """All schedulers of an engine."""

    def __init__(self, given: Any, optimizers: Sequence[Optimizer]) -> None:
        self._schedulers = _checked(given, optimizers)
        self._awaited: Outcome | None = None

    def __len__(self) -> int:
        return len(self._schedulers)

    def after(self, outcome: Outcome) -> None:
        """A step was closed: follow it now if its outcome is known, else before the next."""
        self.settle()
        if self._schedulers:
            self._awaited = outcome
            if outcome.skip_known:
                self.settle()

    def settle(self) -> None:
        """Come up to date; waits if the last step is still on its way."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.skipped:
            for scheduler in self._schedulers:
                scheduler.step()

    def state(self) -> list[dict[str, Any]]:
        self.settle()
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        self._awaited = None
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _checked(given: Any, optimizers: Sequence[Optimizer]) -> list[Any]:
    if given is None:
        return []
    schedulers = list(given) if isinstance(given, Iterable) else [given]
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise BadInput(
                "Engine(scheduler=ReduceLROnPlateau): it moves by a metric, not by steps. Leave it out, and call "
                "scheduler.step(metric) yourself where the metric is known."
            )
        if not callable(getattr(scheduler, "step", None)):
            raise BadInput(f"Engine(scheduler=...): a scheduler is expected, not {type(scheduler).__name__}.")
        its = getattr(scheduler, "optimizer", None)
        if its is not None and not any(its is optimizer for optimizer in optimizers):
            raise BadInput(
                f"Engine(scheduler={type(scheduler).__name__}): it sets the rate of an optimizer that this engine does "
                "not have."
            )
    return schedulers
