"""The data of a page's charts, for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampwise.finding.terminal import printable
from ampwise.numbers.formats import find_scalar_format
from ampwise.report.curves import METRICS, by_optimizer, skip_rates, spread_of, thin_out
from ampwise.report.heat_maps import heat_maps
from ampwise.report.layers import LayerGradients
from ampwise.report.run_facts import optimizer_names
from ampwise.runs.rows import SKIP_RATE_STEPS

if TYPE_CHECKING:
    from ampwise.runs.bucket import StepBucket
    from ampwise.runs.reader import Run

__all__ = ["chart_data", "curves", "curves_of", "shown_layers"]

POINTS = 3000  # per line: three times what a screen shows, so that zooming in shows more
MOST_LINES = 6  # optimizers
MOST_LAYERS = 400
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")  # that gradients may be kept in


def chart_data(run: Run, layers: Sequence[LayerGradients]) -> dict[str, Any]:
    """Return the chart data of one run and its layers."""
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


def shown_layers(layers: Sequence[LayerGradients]) -> list[LayerGradients]:
    """Return the worst layers of each optimizer, as many as a page shows."""
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
    """Return lines to be drawn together, and the chart titles that depend on the data."""
    spans = (zip(line["first"], line["last"], strict=True) for line in lines)
    longest = max((last - first + 1 for span in spans for first, last in span), default=1)
    over = f"the last {SKIP_RATE_STEPS} steps"
    rate = f"Skipped, of {over}" if longest <= SKIP_RATE_STEPS else f"Skipped, of {over} or the point's own steps"
    return {"curves": lines, "titles": {"skip_rate": rate}}


def curves(run: Run, which: str = "") -> list[dict[str, Any]]:
    """Return a line for each optimizer: at each point its steps, and their measurements.

    which: "before" or "after" if two runs are drawn together.
    """
    names = optimizer_names(run)
    lines = list(by_optimizer(thin_out(run.steps, POINTS)).items())[:MOST_LINES]
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


def _line(points: Sequence[StepBucket]) -> dict[str, Any]:
    return {
        "first": [point.first for point in points],
        "last": [point.last for point in points],
        "skipped": [point.skipped for point in points],
        "skip_rate": _rounded(skip_rates(points)),
        **{metric: _metric(points, metric) for metric in METRICS},
    }


def _metric(points: Sequence[StepBucket], metric: str) -> dict[str, Any] | None:
    """Return the means of a metric, and the extremes only if some point has more than one step."""
    spreads = [spread_of(point, metric) for point in points]
    if not any(spread.known for spread in spreads):
        return None
    write = list if metric == "scale" else _rounded  # powers of two are not rounded
    mean, low, high = (write(getattr(spread, part) for spread in spreads) for part in ("mean", "low", "high"))
    return {
        "mean": mean,
        **({} if low == mean == high else {"low": low, "high": high}),
        "bad": {place: spread.bad for place, spread in enumerate(spreads) if spread.bad},
    }


def _about_fates(layers: Sequence[LayerGradients]) -> str:
    """Describe the numbers below the histogram, and what they cannot show."""
    about = "Shares of the nonzero gradients, over all sampled steps: unscaled gradients times the loss scale."
    if not layers or layers[0].underflow is None:
        return about
    limits = "Gradients that FP16 had already flushed to zero count as zeros here: no larger scale brings them back."
    return f"{about} {limits}"


def _layer(layer: LayerGradients, several: bool) -> dict[str, Any]:
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


def _span(layer: LayerGradients) -> int:
    return max(layer.census.binades) - min(layer.census.binades) + 1 if layer.census.binades else 0


def _format(name: str) -> dict[str, Any]:
    """Return the limits of a format, as the census uses them."""
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
    """Round to six digits, which are more than a screen shows."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]
