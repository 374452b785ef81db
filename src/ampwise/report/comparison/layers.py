"""Compare the layers of two runs by name: the share of gradients that FP16 loses, and the norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.findings import plain_name

if TYPE_CHECKING:
    from ampwise.report.layers import LayerGradients

__all__ = ["ComparedLayer", "are_alike", "compared_layers", "only_in"]

REPORTED_CHANGE = 0.01  # report a change of the lost share of a layer from here on
SAME_SIZE = 0.02  # relative difference in size: a vocabulary padded to a multiple of 64 matches, a wider layer does not
ENOUGH = 0.5  # share of layers in common: two versions of a model rather than two models
FACTOR = 1.5  # between two norms: two seeds differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayer:
    """A layer that both runs have. Lost shares are None for a run that did not compute in FP16."""

    name: str
    optimizer: int
    lost_before: float | None
    lost_after: float | None
    norm_before: float
    norm_after: float

    @property
    def more_lost(self) -> float:
        """Increase of the lost share; 0 if one of the runs does not have it."""
        if self.lost_before is None or self.lost_after is None:
            return 0.0
        return self.lost_after - self.lost_before

    @property
    def doublings(self) -> float:
        """Binary logarithm of the change of the norm; infinite if it was zero or became zero."""
        old, new = self.norm_before, self.norm_after
        if old == new or not (math.isfinite(old) and math.isfinite(new)):
            return 0.0
        return math.log2(new) - math.log2(old) if old and new else math.inf if new else -math.inf

    @property
    def changed(self) -> bool:
        """Whether the layer changed enough to be reported."""
        return abs(self.more_lost) >= REPORTED_CHANGE or abs(self.doublings) >= math.log2(FACTOR)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        parts = ("name", "optimizer", "lost_before", "lost_after", "norm_before", "norm_after", "changed")
        return {part: getattr(self, part) for part in parts}


def compared_layers(before: Sequence[LayerGradients], after: Sequence[LayerGradients]) -> list[ComparedLayer]:
    """Return the layers that both runs have, the most changed first: by the lost share, then by the norm.

    Two layers match if they have the same name, optimizer and number of values.
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
    # Rounded to a hundredth: a finer order would be noise.
    return sorted(found, key=lambda layer: (-round(abs(layer.more_lost), 2), -abs(layer.doublings)))


def are_alike(before: Sequence[LayerGradients], after: Sequence[LayerGradients], in_common: int) -> bool:
    """Return whether two runs trained roughly the same model, by the number of layers in common."""
    return in_common >= ENOUGH * max(len(before), len(after))


def only_in(layers: Sequence[LayerGradients], others: Sequence[LayerGradients]) -> list[str]:
    """Return the names of layers that the other run lacks, in the order of ``layers``; with the size if it differs."""
    known = {_key(layer): layer for layer in others}
    return [
        f"{plain_name(layer.name)} ({_values(layer):,.0f} values)" if _key(layer) in known else plain_name(layer.name)
        for layer in layers
        if not _has(known, layer)
    ]


def _has(known: Mapping[tuple[int, str], LayerGradients], layer: LayerGradients) -> bool:
    other = known.get(_key(layer))
    return other is not None and math.isclose(_values(layer), _values(other), rel_tol=SAME_SIZE)


def _values(layer: LayerGradients) -> float:
    """Return the number of values in one step."""
    return layer.census.count / max(1, layer.steps)


def _key(layer: LayerGradients) -> tuple[int, str]:
    return layer.optimizer, plain_name(layer.name)
