"""Layers over time: what was lost of each one's gradients, how large they were; of merged samples both extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ampwise.evidence.underflow import scale_exponent, underflow
from ampwise.printers.terminal import printable
from ampwise.report.facts import optimizer_names
from ampwise.report.layers import Layer

if TYPE_CHECKING:
    from ampwise.census.algebra import Census
    from ampwise.record.reader import Run
    from ampwise.record.rows import LayerSample

__all__ = ["COLUMNS", "heat_maps"]

COLUMNS = 160  # of samples; more are put together
PER_MILLION = 10**6  # lost shares are whole numbers of these: as text they are short, and a small one is not zero
PER_POWER = 16  # logarithms are whole numbers of sixteenths of a power of two
NONE, ZERO, BAD = None, "zero", "bad"  # not sampled; no value but zero; inf or NaN among the values

Cell = int | str | None
Measure = Callable[["Census", "LayerSample"], Cell]


def heat_maps(run: Run, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """One for each optimizer: rows in the order of the model, columns in the order of steps.

    ``rows`` are places in ``layers``. ``lost`` is the share that FP16 turned to zero (of a run in another format: would
    turn to zero without a loss scale); ``lost_low`` is there where samples were put together.
    """
    names = optimizer_names(run)
    optimizers = dict.fromkeys(layer.optimizer for layer in sorted(layers, key=lambda layer: layer.optimizer))
    return [
        {"name": printable(names.get(optimizer, f"optimizer {optimizer}")), **_map(run, layers, optimizer)}
        for optimizer in optimizers
    ]


def _map(run: Run, layers: Sequence[Layer], optimizer: int) -> dict[str, Any]:
    samples = [sample for sample in run.layers if sample.optimizer == optimizer]
    shown = {layer.name: place for place, layer in enumerate(layers) if layer.optimizer == optimizer}
    ordered = [name for name in dict.fromkeys(name for one in samples for name in one.layers) if name in shown]
    was_fp16 = any(layer.underflow is not None for layer in layers)
    groups = _grouped(samples)
    lost = [[_cells(group, name, _lost(was_fp16)) for group in groups] for name in ordered]
    high, low = ([[_extreme(cells, extreme) for cells in row] for row in lost] for extreme in (max, min))
    return {
        "rows": [shown[name] for name in ordered],
        "first": [group[0].first for group in groups],
        "last": [group[-1].last for group in groups],
        "exponent": [None if group[-1].scale is None else scale_exponent(group[-1].scale) for group in groups],
        "was_fp16": was_fp16,
        "lost": high,
        **({} if low == high else {"lost_low": low}),
        **{name: _largest_of(groups, ordered, measure) for name, measure in (("norm", _norm), ("largest", _largest))},
    }


def _largest_of(groups: Sequence[Sequence[LayerSample]], ordered: Sequence[str], measure: Measure) -> list[list[Cell]]:
    return [[_extreme(_cells(group, name, measure), max) for group in groups] for name in ordered]


def _grouped(samples: Sequence[LayerSample]) -> list[list[LayerSample]]:
    """Neighbours, so that at most COLUMNS are left."""
    size = max(1, -(-len(samples) // COLUMNS))
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def _cells(group: Sequence[LayerSample], name: str, measure: Measure) -> list[Cell]:
    """Of the samples that have the layer."""
    return [measure(sample.layers[name], sample) for sample in group if name in sample.layers]


def _extreme(cells: Sequence[Cell], extreme: Callable[..., int]) -> Cell:
    """An inf or NaN in any of them is what one has to know."""
    if BAD in cells:
        return BAD
    numbers = [cell for cell in cells if isinstance(cell, int)]
    return extreme(numbers) if numbers else ZERO if ZERO in cells else NONE


def _lost(was_fp16: bool) -> Measure:
    def measure(census: Census, sample: LayerSample) -> Cell:
        if not census.finite:
            return BAD
        if not census.nonzeros:
            return ZERO
        lost = underflow(census, sample.scale).lost_share if was_fp16 else _flushed_share(census)
        return math.ceil(lost * PER_MILLION)

    return measure


def _flushed_share(census: Census) -> float:
    return census.flushed("fp16").low / census.nonzeros


def _largest(census: Census, sample: LayerSample) -> Cell:
    return _logarithm(census, census.amax)


def _norm(census: Census, sample: LayerSample) -> Cell:
    return _logarithm(census, census.norm / math.sqrt(max(1, sample.steps)))


def _logarithm(census: Census, value: float) -> Cell:
    if not census.finite:
        return BAD
    return round(math.log2(value) * PER_POWER) if 0 < value < math.inf else ZERO
