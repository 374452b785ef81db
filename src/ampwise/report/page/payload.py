"""The numbers that the charts of a page are drawn from, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampwise.formats import find_scalar_format
from ampwise.printers.terminal import printable
from ampwise.record.rows import SKIP_RATE_OVER
from ampwise.report.curves import METRICS, by_optimizer, skip_rates, spread_of, thinned
from ampwise.report.facts import optimizer_names
from ampwise.report.heat import heat_maps
from ampwise.report.layers import Layer

if TYPE_CHECKING:
    from ampwise.record.bucket import Bucket
    from ampwise.record.reader import Run

__all__ = ["curves", "curves_of", "payload", "shown_layers"]

POINTS = 3000  # a line: three times what a screen shows, so that a closer look shows more
MOST_LINES = 6  # optimizers
MOST_LAYERS = 400
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")  # that gradients may be kept in


def payload(run: Run, layers: Sequence[Layer]) -> dict[str, Any]:
    """Of one run, and of all its layers."""
    shown = shown_layers(layers)
    several = len({layer.optimizer for layer in layers}) > 1
    return {
        **curves_of(curves(run)),
        "formats": [_format(name) for name in FORMATS],
        "format": layers[0].fmt.name if layers and layers[0].fmt.name in FORMATS else FORMATS[0],
        "layers": [_layer(layer, several) for layer in shown],
        "about_fates": _about_fates(layers),
        "heat": heat_maps(run, shown),
        "layers_left": len(layers) - len(shown),
    }


def shown_layers(layers: Sequence[Layer]) -> list[Layer]:
    """The worst of each optimizer, as many as a page has room for."""
    optimizers = {layer.optimizer for layer in layers}
    each = max(1, MOST_LAYERS // max(1, len(optimizers)))
    taken: Counter[int] = Counter()
    shown = []
    for layer in layers:
        taken[layer.optimizer] += 1
        if taken[layer.optimizer] <= each:
            shown.append(layer)
    return shown


def curves_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Lines to be drawn together, and what their charts are called where the data decides."""
    spans = (zip(line["first"], line["last"], strict=True) for line in lines)
    longest = max((last - first + 1 for span in spans for first, last in span), default=1)
    over = f"the last {SKIP_RATE_OVER} steps"
    rate = f"Skipped, of {over}" if longest <= SKIP_RATE_OVER else f"Skipped, of {over} or the point's own"
    return {"curves": lines, "titles": {"skip_rate": rate}}


def curves(run: Run, which: str = "") -> list[dict[str, Any]]:
    """A line for each optimizer: at each point its steps, and what was measured over them.

    which: of the runs that are drawn together.
    """
    names = optimizer_names(run)
    lines = list(by_optimizer(thinned(run.steps, POINTS)).items())[:MOST_LINES]
    several = len(lines) > 1 or not which
    return [
        {
            "name": printable(_named(which, names.get(optimizer, f"optimizer {optimizer}"), several)),
            "run": which,
            **_line(points),
        }
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
    write = list if metric == "scale" else _rounded  # a power of two stays one
    mean, low, high = (write(getattr(spread, part) for spread in spreads) for part in ("mean", "low", "high"))
    return {
        "mean": mean,
        **({} if low == mean == high else {"low": low, "high": high}),
        "bad": {place: spread.bad for place, spread in enumerate(spreads) if spread.bad},
    }


def _about_fates(layers: Sequence[Layer]) -> str:
    """What the numbers below the histogram are of, and what they cannot know."""
    told = "Shares of the gradients that are not zero, over all sampled steps, in true units times the loss scale."
    if not layers or layers[0].underflow is None:
        return told
    gone = "What FP16 had turned to zero before it was counted is among the zeros: no larger scale brings it back here."
    return f"{told} {gone}"


def _layer(layer: Layer, several: bool) -> dict[str, Any]:
    census = layer.census
    lowest = min(census.binades, default=0)
    return {
        "name": printable(layer.name_and_owner if several else layer.name),
        "exponent": layer.exponent,
        "exact": layer.scale is None or layer.scale == 2.0**layer.exponent,
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
    }


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]
