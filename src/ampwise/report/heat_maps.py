"""Heat maps of layers over steps: share of gradients lost, norm and largest value; both extremes of merged samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ampwise.finding.terminal import printable
from ampwise.numbers.census.underflow import scale_exponent, underflow
from ampwise.report.layers import LayerGradients
from ampwise.report.run_facts import optimizer_names

if TYPE_CHECKING:
    from ampwise.numbers.census.algebra import Census
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import LayerSample

__all__ = ["COLUMNS", "PER_MILLION", "PER_POWER", "heat_maps"]

COLUMNS = 160  # columns of a map; more samples are merged
PER_MILLION = 10**6  # lost shares are integers in these units: short as text, and a small share is not zero
PER_POWER = 256  # logarithms are integers in these fractions of a power of two: three digits of the number
NONE, ZERO, BAD = None, "zero", "bad"  # not sampled; no value but zero; inf or NaN among the values

Value = int | str | None


class HeatCell(NamedTuple):
    """Values of one layer in one sample."""

    lost: Value
    norm: Value
    largest: Value


def heat_maps(run: Run, layers: Sequence[LayerGradients]) -> list[dict[str, Any]]:
    """Return a map for each optimizer: rows in the order of the model, columns in the order of steps.

    ``rows`` are indices into ``layers``. ``lost`` is the share that FP16 flushed to zero (for a run in another format:
    would flush to zero without a loss scale); ``lost_low`` is present if samples were merged. ``exponent`` is that of
    the lowest loss scale in a column, at which most is lost, and ``exponent_high`` that of the highest. ``samples`` and
    ``steps`` are the totals of all columns; ``merged`` is true if some column has more than one of them.
    """
    names = optimizer_names(run)
    optimizers = dict.fromkeys(layer.optimizer for layer in sorted(layers, key=lambda layer: layer.optimizer))
    was_fp16 = any(layer.underflow is not None for layer in layers)
    known = _CACHE.of(run.layers, was_fp16=was_fp16)
    return [
        {
            "name": printable(names.get(optimizer, f"optimizer {optimizer}")),
            "was_fp16": was_fp16,
            "per_power": PER_POWER,
            "per_million": PER_MILLION,
            **_map([one for one in known if one.sample.optimizer == optimizer], _rows(layers, optimizer)),
        }
        for optimizer in optimizers
    ]


# --- cells ---------------------------------------------------------------------------------------------------------


class _Sample:
    """A sample with its cells, each computed once: computing a cell takes much longer than using it."""

    def __init__(self, sample: LayerSample, *, was_fp16: bool) -> None:
        self.sample, self.was_fp16 = sample, was_fp16
        self._cells: dict[str, HeatCell] = {}

    def cell(self, name: str) -> HeatCell | None:
        """Return the cell of a layer; None if the sample does not have the layer."""
        known = self._cells.get(name)
        if known is None and name in self.sample.layers:
            known = self._cells[name] = _cell(self.sample.layers[name], self.sample, self.was_fp16)
        return known


class _SampleCache:
    """Cache of the samples of the run that was drawn last, with their cells.

    A live page is drawn again for every new sample, and all earlier ones are the same objects as before, so the cache
    is keyed by id. It keeps the sample itself, so that its id is not reused.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def of(self, samples: Iterable[LayerSample], *, was_fp16: bool) -> list[_Sample]:
        """Return the cached form of these samples, and drop all others from the cache."""
        found = []
        for sample in samples:
            known = self._samples.get(id(sample))
            if known is None or known.was_fp16 != was_fp16:
                known = _Sample(sample, was_fp16=was_fp16)
            found.append(known)
        self._samples = {id(one.sample): one for one in found}
        return found


_CACHE = _SampleCache()


def _cell(census: Census, sample: LayerSample, was_fp16: bool) -> HeatCell:
    if not census.finite:
        return HeatCell(BAD, BAD, BAD)
    norm = census.norm / math.sqrt(max(1, sample.steps))
    return HeatCell(_lost(census, sample, was_fp16), _logarithm(norm), _logarithm(census.amax))


def _lost(census: Census, sample: LayerSample, was_fp16: bool) -> Value:
    if not census.nonzeros:
        return ZERO
    lost = underflow(census, sample.scale).lost_share if was_fp16 else census.flushed("fp16").low / census.nonzeros
    return math.ceil(lost * PER_MILLION)


def _logarithm(value: float) -> Value:
    return round(math.log2(value) * PER_POWER) if 0 < value < math.inf else ZERO


# --- maps ----------------------------------------------------------------------------------------------------------


def _rows(layers: Sequence[LayerGradients], optimizer: int) -> dict[str, int]:
    """Return the indices into ``layers`` of an optimizer's layers, by name."""
    return {layer.name: place for place, layer in enumerate(layers) if layer.optimizer == optimizer}


def _map(samples: Sequence[_Sample], shown: dict[str, int]) -> dict[str, Any]:
    names = [name for name in dict.fromkeys(name for one in samples for name in one.sample.layers) if name in shown]
    groups = _grouped(samples)
    columns = [[one.sample for one in group] for group in groups]
    cells = [[_cells(group, name) for group in groups] for name in names]
    lost, lost_low = (_extremes(cells, "lost", extreme) for extreme in (max, min))
    return {
        "rows": [shown[name] for name in names],
        "first": [column[0].first for column in columns],
        "last": [column[-1].last for column in columns],
        "exponent": [min(_exponents(column), default=None) for column in columns],
        "exponent_high": [max(_exponents(column), default=None) for column in columns],
        "samples": len(samples),
        "steps": sum(one.sample.steps for one in samples),
        "merged": any(len(column) > 1 or column[0].steps > 1 for column in columns),
        "lost": lost,
        **({} if lost_low == lost else {"lost_low": lost_low}),
        "norm": _extremes(cells, "norm", max),
        "largest": _extremes(cells, "largest", max),
    }


def _grouped(samples: Sequence[_Sample]) -> list[Sequence[_Sample]]:
    """Group neighbouring samples into at most COLUMNS groups."""
    size = max(1, -(-len(samples) // COLUMNS))
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _exponents(column: Sequence[LayerSample]) -> list[int]:
    """Return the exponents of the loss scales, where there are any."""
    return [scale_exponent(sample.scale) for sample in column if sample.scale is not None]


def _cells(group: Sequence[_Sample], name: str) -> list[HeatCell]:
    """Return the layer's cells in the samples that have it."""
    return [cell for one in group if (cell := one.cell(name)) is not None]


def _extremes(rows: Sequence[Sequence[list[HeatCell]]], what: str, extreme: Callable[..., int]) -> list[list[Value]]:
    place = HeatCell._fields.index(what)
    return [[_extreme([cell[place] for cell in cells], extreme) for cells in row] for row in rows]


def _extreme(values: Sequence[Value], extreme: Callable[..., int]) -> Value:
    """Return the extreme of the values; BAD if any of them has an inf or NaN."""
    if len(values) == 1:
        return values[0]
    if BAD in values:
        return BAD
    numbers = [value for value in values if isinstance(value, int)]
    return extreme(numbers) if numbers else ZERO if ZERO in values else NONE
