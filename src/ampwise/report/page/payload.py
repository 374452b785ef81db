"""The numbers that the charts of a page are drawn from, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampwise.formats import find_scalar_format
from ampwise.printers.terminal import printable
from ampwise.report.curves import METRICS, by_optimizer, skip_rates, spread_of, thinned
from ampwise.report.facts import optimizer_names
from ampwise.report.heat import heat_maps
from ampwise.report.layers import Layer

if TYPE_CHECKING:
    from ampwise.record.bucket import Bucket
    from ampwise.record.reader import Run

__all__ = ["MOST_LAYERS", "curves", "payload"]

POINTS = 3000  # a line: three times what a screen shows, so that a closer look shows more
MOST_LINES = 6  # optimizers
MOST_LAYERS = 400
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")  # that gradients may be kept in


def payload(run: Run, layers: Sequence[Layer]) -> dict[str, Any]:
    """Of one run."""
    shown = layers[:MOST_LAYERS]
    return {
        "curves": curves(run),
        "formats": [_format(name) for name in FORMATS],
        "layers": [_layer(layer) for layer in shown],
        "heat": heat_maps(run, shown),
    }


def curves(run: Run, which: str = "") -> list[dict[str, Any]]:
    """A line for each optimizer: at each point its steps, and what was measured over them.

    which: of the runs that are drawn together.
    """
    names = optimizer_names(run)
    lines = list(by_optimizer(thinned(run.steps, POINTS)).items())[:MOST_LINES]
    several = len(lines) > 1 or not which
    return [
        {"name": printable(_named(which, names.get(optimizer, f"optimizer {optimizer}"), several)), **_line(points)}
        for optimizer, points in lines
    ]


def _named(which: str, optimizer: str, several: bool) -> str:
    return ": ".join(part for part in (which, optimizer if several else "") if part)


def _line(points: Sequence[Bucket]) -> dict[str, Any]:
    return {
        "first": [point.first for point in points],
        "last": [point.last for point in points],
        "skipped": [point.skipped for point in points],
        "skip_rate": _rounded(skip_rates(points)),
        **{metric: _metric(points, metric) for metric in METRICS},
    }


def _metric(points: Sequence[Bucket], metric: str) -> dict[str, Any] | None:
    """The extremes stand beside the means only where there is more than one step to a point."""
    spreads = [spread_of(point, metric) for point in points]
    if not any(spread.known for spread in spreads):
        return None
    mean = _rounded(spread.mean for spread in spreads)
    low, high = _rounded(spread.low for spread in spreads), _rounded(spread.high for spread in spreads)
    return {
        "mean": mean,
        **({} if low == mean == high else {"low": low, "high": high}),
        "bad": {place: spread.bad for place, spread in enumerate(spreads) if spread.bad},
    }


def _layer(layer: Layer) -> dict[str, Any]:
    census = layer.census
    lowest = min(census.binades, default=0)
    return {
        "name": printable(layer.name),
        "owner": printable(layer.owner),
        "exponent": layer.exponent,
        "lowest": lowest,
        "counts": [census.binades.get(lowest + place, 0) for place in range(_span(layer))],
        "zeros": census.zeros,
        "infs": census.infs,
        "nans": census.nans,
        "amin": census.amin,
        "amax": census.amax,
        "steps": layer.steps,
    }


def _span(layer: Layer) -> int:
    return max(layer.census.binades) - min(layer.census.binades) + 1 if layer.census.binades else 0


def _format(name: str) -> dict[str, Any]:
    """The limits of a format, as the census reads them."""
    fmt = find_scalar_format(name)
    return {
        "name": name,
        "label": name.upper(),
        "flush": fmt.flush_exponent,
        "lowest": fmt.lowest_exponent,
        "overflow_binade": fmt.overflow_binade,
        "overflow": fmt.overflow_threshold,
        "overflow_at": fmt.overflow_at_threshold,
        "smallest": fmt.smallest,
        "max": fmt.max,
    }


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]
