"""Learning-rate schedulers that step with the optimizers, and not when a step was skipped.

Whether a step was skipped is known on the device first. The learning rate is not needed before the next step, so the
schedulers step just before that; by then the flag has been copied to the host, and nothing syncs with the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.train.engine_state import has_compatible_type
from ampwise.train.scaler.step_result import StepResult

__all__ = ["SchedulerSet"]


class SchedulerSet:
    """All schedulers of an engine."""

    def __init__(self, given: Any, optimizers: Sequence[Optimizer]) -> None:
        self.schedulers: list[Any] = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
        for scheduler in self.schedulers:
            if isinstance(scheduler, type):
                raise BadInput(
                    f"Engine(scheduler={scheduler.__name__}): expected a scheduler, got the class. Create one with the "
                    "optimizer."
                )
            if isinstance(scheduler, ReduceLROnPlateau):
                raise BadInput(
                    "Engine(scheduler=ReduceLROnPlateau): it needs a metric, which the engine does not have. Do not "
                    "pass it; call scheduler.step(metric) yourself."
                )
            if not callable(getattr(scheduler, "step", None)):
                raise BadInput(f"Engine(scheduler=...): expected a scheduler, got {type(scheduler).__name__}.")
            its = getattr(scheduler, "optimizer", None)
            if not _is_one_of(its, optimizers):
                raise BadInput(
                    f"Engine(scheduler={type(scheduler).__name__}): its optimizer is not one of this engine's. Create "
                    "it with the optimizer passed to Engine."
                )
        self._awaited: tuple[StepResult, list[Any]] | None = None
        self._places: dict[int, Any] = {}  # last_epoch of each, as the engine left it

    def __len__(self) -> int:
        return len(self.schedulers)

    def after(self, outcome: StepResult, stepping: Sequence[Optimizer]) -> None:
        """Step the schedulers of these optimizers: now if it is known whether the step was skipped, else later."""
        self.settle()
        moving = [each for each in self.schedulers if _is_one_of(getattr(each, "optimizer", None), stepping)]
        if moving:
            self._awaited = outcome, moving
            if outcome.is_skip_known:
                self.settle()

    def settle(self) -> None:
        """Step the schedulers for the last step, if that is still to be done. Syncs with it if it is not finished."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited[0].skipped:
            for scheduler in awaited[1]:
                before = self._places.get(id(scheduler))
                if before is not None and scheduler.last_epoch != before:
                    name = type(scheduler).__name__
                    log(
                        "warning",
                        "{0} was stepped outside the engine, which steps it itself. Do not call {0}.step().",
                        name,
                    )
                scheduler.step()
                self._places[id(scheduler)] = getattr(scheduler, "last_epoch", None)

    def state(self) -> list[dict[str, Any]]:
        self.settle()
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load states; raise ValueError for one that a scheduler cannot use, as torch's load_state_dict checks nothing.

        An entry must not replace a method. Entries that the scheduler lacks, as from another torch, are allowed.
        """
        self._awaited = None
        self._places.clear()
        for scheduler, state in zip(self.schedulers, states, strict=True):
            kind = type(scheduler).__name__
            if not isinstance(state, dict):
                raise ValueError(f"the state of {kind} is {ascii(state)[:40]}")
            own = scheduler.state_dict()
            for name, value in state.items():
                if name in own:
                    fits = has_compatible_type(value, own[name])
                else:
                    fits = not (isinstance(name, str) and hasattr(scheduler, name))
                if not fits:
                    raise ValueError(f"the state of {kind} has {ascii(value)[:40]} for {ascii(name)[:40]}")
            scheduler.load_state_dict(state)


def _is_one_of(optimizer: Any, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the optimizer is one of these; True for None, as some schedulers do not name theirs."""
    return optimizer is None or any(optimizer is each for each in optimizers)
