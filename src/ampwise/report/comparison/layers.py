"""The layers of two runs by name: whose gradients FP16 loses more or less of, and whose norm has changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.findings import plain_name

if TYPE_CHECKING:
    from ampwise.report.layers import Layer

__all__ = ["ComparedLayer", "are_alike", "compared_layers", "only_in"]

WORTH_TELLING = 0.01  # of the values of a layer, lost in one run and not in the other
SAME_SIZE = 0.02  # of the values: a vocabulary filled up to a multiple of 64 is the same, a wider layer is not
ENOUGH = 0.5  # of the layers in common: two versions of a model, and not two models
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
    """Those that both runs have, what changed the most first: first by what is lost, then by the norm.

    Two are the same if they have the same name, under the same optimizer, and as many values.
    """
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
        if _has(old, layer)
    ]
    # Shares of a hundredth: a finer order would be that of chance.
    return sorted(found, key=lambda layer: (-round(abs(layer.more_lost), 2), -abs(layer.doublings)))


def are_alike(before: Sequence[Layer], after: Sequence[Layer], in_common: int) -> bool:
    """Whether two models are one, more or less, by how many layers they have in common."""
    return in_common >= ENOUGH * max(len(before), len(after))


def only_in(layers: Sequence[Layer], others: Sequence[Layer]) -> list[str]:
    """The names of layers that the other run does not have, in the order of ``layers``; with their size if need be."""
    known = {_key(layer): layer for layer in others}
    return [
        f"{plain_name(layer.name)} ({_values(layer):,.0f} values)" if _key(layer) in known else plain_name(layer.name)
        for layer in layers
        if not _has(known, layer)
    ]


def _has(known: Mapping[tuple[int, str], Layer], layer: Layer) -> bool:
    other = known.get(_key(layer))
    return other is not None and math.isclose(_values(layer), _values(other), rel_tol=SAME_SIZE)


def _values(layer: Layer) -> float:
    """Of one step."""
    return layer.census.count / max(1, layer.steps)


def _key(layer: Layer) -> tuple[int, str]:
    return layer.optimizer, plain_name(layer.name)
