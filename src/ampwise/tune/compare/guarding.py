"""The shared weights stay finite, or it is said whose steps they did not survive."""

from __future__ import annotations

from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.snapshot import Snapshot, are_finite
from ampwise.tune.subject import Subject

__all__ = ["WeightGuard"]

WHAT_TO_DO = "a lower learning rate of the optimizer that it returns is what helps, or none of its own."


class WeightGuard:
    """Looks at the weights after steps; what it finds spoiled it puts back as it was in the beginning."""

    def __init__(self, lineup: Lineup, subject: Subject, optimizer: Optimizer) -> None:
        self._lineup, self._subject = lineup, subject
        self._snapshot = Snapshot(subject.model, optimizer)

    def look(self, contender: Contender) -> None:
        """After steps of this contender, which is out if they spoiled the weights."""
        if self._finite():
            return
        if contender.is_base:
            raise BadInput(f"{self._subject.name}: the weights are not finite after a few steps in FP32: {WHAT_TO_DO}")
        self._lineup.drop(contender, "not finite: the weights, after a few of its steps")
        self._snapshot.restore()

    def insist(self) -> None:
        """In the end: times of steps on weights that are not finite are not told."""
        if not self._finite():
            raise BadInput(
                f"{self._subject.name}: the weights are not finite after the steps that were measured: {WHAT_TO_DO}"
            )

    def _finite(self) -> bool:
        return are_finite(self._subject.parameters)
