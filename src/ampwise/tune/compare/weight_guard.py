"""Keep the shared weights finite, or report whose steps made them non-finite."""

from __future__ import annotations

from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.snapshot import ModelSnapshot, are_finite
from ampwise.tune.train_case import TrainCase

__all__ = ["WeightGuard"]

WHAT_TO_DO = "lower the learning rate of the optimizer that it returns, or return none."


class WeightGuard:
    """Checks the weights after steps, and restores the initial ones if they are not finite."""

    def __init__(self, lineup: Lineup, case: TrainCase, optimizer: Optimizer) -> None:
        self._lineup, self._case = lineup, case
        self._snapshot = ModelSnapshot(case.model, optimizer)

    def look(self, contender: Contender) -> None:
        """Check after steps of this contender; drop it if the weights are not finite."""
        if self._finite():
            return
        if contender.is_base:
            raise BadInput(f"{self._case.name}: the weights are not finite after a few steps in FP32: {WHAT_TO_DO}")
        self._lineup.drop(contender, "not finite: the weights, after a few steps")
        self._snapshot.restore()

    def insist(self) -> None:
        """Raise BadInput at the end if the weights are not finite: such times are not reported."""
        if not self._finite():
            raise BadInput(f"{self._case.name}: the weights are not finite after the measured steps: {WHAT_TO_DO}")

    def _finite(self) -> bool:
        return are_finite(self._case.parameters)
