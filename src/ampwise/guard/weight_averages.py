"""Weight averages (EMA, SWA) that leave out steps that were skipped or undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from ampwise.train.step import Step

__all__ = ["AveragedModels"]

UPDATE = "update_parameters"


class AveragedModels:
    """The AveragedModels among the objects that a guard saves."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._models = [each for each in state.values() if isinstance(each, AveragedModel)]
        self.last: Step | None = None  # the last completed step

    def hook(self) -> None:
        for average in self._models:
            vars(average)[UPDATE] = GuardedUpdate(average, self)

    def unhook(self) -> None:
        for average in self._models:
            vars(average).pop(UPDATE, None)


class GuardedUpdate:
    """Replacement for an AveragedModel's ``update_parameters`` that does nothing if the last step was not applied.

    It waits for that step's result.
    """

    def __init__(self, average: AveragedModel, averages: AveragedModels) -> None:
        self._average, self._averages = average, averages  # not the guard, which is to be freed when unused

    def __call__(self, model: Module) -> None:
        last = self._averages.last
        if last is None or last.applied:
            type(self._average).update_parameters(self._average, model)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled average gets its own method back: it does not belong to the guard.
        return getattr, (self._average, UPDATE)
