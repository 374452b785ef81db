"""Learning-rate schedulers that move with the steps that were taken, and stand still on those that were skipped.

Whether a step was skipped is known on the device first. The rate is not needed before the next step: the
schedulers wait until then, by when the news has arrived, so that nobody waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampwise.engine.alike import is_alike
from ampwise.engine.scaling.outcome import Outcome
from ampwise.errors import BadInput
from ampwise.printers.terminal import printable

__all__ = ["Schedules"]


class Schedules:
    """All schedulers of an engine."""

    def __init__(self, given: Any, optimizers: Sequence[Optimizer]) -> None:
        self._schedulers = _checked(given, optimizers)
        self._awaited: tuple[Outcome, list[Any]] | None = None
        self._places: dict[int, Any] = {}  # where the engine has left each

    def __len__(self) -> int:
        return len(self._schedulers)

    def after(self, outcome: Outcome, stepping: Sequence[Optimizer]) -> None:
        """A step of these optimizers was closed: follow it now if its outcome is known, else before the next."""
        self.settle()
        moving = [each for each in self._schedulers if _is_one_of(getattr(each, "optimizer", None), stepping)]
        if moving:
            self._awaited = outcome, moving
            if outcome.skip_known:
                self.settle()

    def settle(self) -> None:
        """Come up to date; waits if the last step is still on its way."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited[0].skipped:
            for scheduler in awaited[1]:
                self._warn_if_moved(scheduler)
                scheduler.step()
                self._places[id(scheduler)] = getattr(scheduler, "last_epoch", None)

    def _warn_if_moved(self, scheduler: Any) -> None:
        before = self._places.get(id(scheduler))
        if before is not None and scheduler.last_epoch != before:
            name = type(scheduler).__name__
            warnings.warn(
                printable(f"{name} was moved by someone else: it was given to the engine, which moves it."),
                UserWarning,
                stacklevel=2,
            )

    def state(self) -> list[dict[str, Any]]:
        self.settle()
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        self._awaited = None
        self._places.clear()
        for scheduler, state in zip(self._schedulers, states, strict=True):
            _refuse_other_kind(scheduler, state)
            scheduler.load_state_dict(state)


def _refuse_other_kind(scheduler: Any, state: Any) -> None:
    """ValueError for a state with which the scheduler could not go on: torch's takes whatever it is given for its own.

    Nothing may take the place of a method, either. What it has not, such as what another torch saved, is let through.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the state of {type(scheduler).__name__} is {ascii(state)[:40]}")
    own = scheduler.state_dict()
    for name, value in state.items():
        fits = is_alike(value, own[name]) if name in own else not (isinstance(name, str) and hasattr(scheduler, name))
        if not fits:
            raise ValueError(f"the state of {type(scheduler).__name__} has {ascii(value)[:40]} for {ascii(name)[:40]}")


def _checked(given: Any, optimizers: Sequence[Optimizer]) -> list[Any]:
    if given is None:
        return []
    schedulers = list(given) if isinstance(given, Iterable) else [given]
    for scheduler in schedulers:
        if isinstance(scheduler, type):
            raise BadInput(f"Engine(scheduler={scheduler.__name__}): this is the class. Make one for the optimizer.")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise BadInput(
                "Engine(scheduler=ReduceLROnPlateau): it moves by a metric, not by steps. Leave it out, and call "
                "scheduler.step(metric) yourself where the metric is known."
            )
        if not callable(getattr(scheduler, "step", None)):
            raise BadInput(f"Engine(scheduler=...): a scheduler is expected, not {type(scheduler).__name__}.")
        its = getattr(scheduler, "optimizer", None)
        if not _is_one_of(its, optimizers):
            raise BadInput(
                f"Engine(scheduler={type(scheduler).__name__}): it sets the rate of an optimizer that this engine does "
                "not have."
            )
    return schedulers


def _is_one_of(optimizer: Any, optimizers: Sequence[Optimizer]) -> bool:
    """Whether it is, as far as one can tell: some schedulers do not say whose they are."""
    return optimizer is None or any(optimizer is each for each in optimizers)
