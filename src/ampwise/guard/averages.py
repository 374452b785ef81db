"""Averages of weights, which a step that did not count must not be counted in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from ampwise.engine.step import Step

__all__ = ["Averages"]

UPDATE = "update_parameters"


class Averages:
    """Those among what a guard saves: each AveragedModel."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._found = [each for each in state.values() if isinstance(each, AveragedModel)]
        self.last: Step | None = None  # that was closed

    def hook(self) -> None:
        for average in self._found:
            vars(average)[UPDATE] = Update(average, self)

    def unhook(self) -> None:
        for average in self._found:
            vars(average).pop(UPDATE, None)


class Update:
    """Stands in for the ``update_parameters`` of one average: nothing happens if the last step has moved no weights.

    It waits for that step.
    """

    def __init__(self, average: AveragedModel, averages: Averages) -> None:
        self._average, self._averages = average, averages  # and not the guard, which goes when nobody has it

    def __call__(self, model: Module) -> None:
        last = self._averages.last
        if last is None or last.applied:
            type(self._average).update_parameters(self._average, model)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the average, or one that is pickled, has its own method: it is not the guard's.
        return getattr, (self._average, UPDATE)
