"""The layers of two runs by name: whose gradients FP16 loses more or less of, and whose norm has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.findings import plain_name

if TYPE_CHECKING:
    from ampwise.report.layers import Layer

__all__ = ["ComparedLayer", "compared_layers", "only_in"]

WORTH_TELLING = 0.01  # of the values of a layer, lost in one run and not in the other
FACTOR = 1.5  # between two norms: less is what two seeds do


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayer:
    """A layer that both runs have. ``lost`` is None for a run that did not compute in FP16."""

    name: str
    optimizer: int
    lost_before: float | None
    lost_after: float | None
    norm_before: float
    norm_after: float

    @property
    def more_lost(self) -> float:
        """By how much a larger share is lost; 0 where one of the runs does not know."""
        if self.lost_before is None or self.lost_after is None:
            return 0.0
        return self.lost_after - self.lost_before

    @property
    def doublings(self) -> float:
        """How often the norm has doubled; infinite for one that was zero, or became so."""
        old, new = self.norm_before, self.norm_after
        if old == new or not (math.isfinite(old) and math.isfinite(new)):
            return 0.0
        return math.log2(new) - math.log2(old) if old and new else math.inf if new else -math.inf

    @property
    def changed(self) -> bool:
        """Enough to be worth a line."""
        return abs(self.more_lost) >= WORTH_TELLING or abs(self.doublings) >= math.log2(FACTOR)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        parts = ("name", "optimizer", "lost_before", "lost_after", "norm_before", "norm_after", "changed")
        return {part: getattr(self, part) for part in parts}


def compared_layers(before: Sequence[Layer], after: Sequence[Layer]) -> list[ComparedLayer]:
    """Those that both runs have, what changed the most first: first by what is lost, then by the norm."""
    old = {_key(layer): layer for layer in before}
    found = [
        ComparedLayer(
            name=plain_name(layer.name),
            optimizer=layer.optimizer,
            lost_before=old[_key(layer)].lost,
            lost_after=layer.lost,
            norm_before=old[_key(layer)].norm,
            norm_after=layer.norm,
        )
        for layer in after
        if _key(layer) in old
    ]
    # Shares of a hundredth: a finer order would be that of chance.
    return sorted(found, key=lambda layer: (-round(abs(layer.more_lost), 2), -abs(layer.doublings)))


def only_in(layers: Sequence[Layer], others: Sequence[Layer]) -> list[str]:
    """The names of layers that the other run does not have, in the order of ``layers``."""
    known = {_key(layer) for layer in others}
    return [plain_name(layer.name) for layer in layers if _key(layer) not in known]


def _key(layer: Layer) -> tuple[int, str]:
    return layer.optimizer, plain_name(layer.name)
