"""The data of a page's charts, for JSON: curves, histograms of layers, and heat maps of layers over steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ampwise.finding.terminal import printable
from ampwise.numbers.census.underflow import scale_exponent, underflow
from ampwise.numbers.formats import find_scalar_format
from ampwise.report.curves import by_optimizer, skip_rates, thin_out
from ampwise.report.layers import LayerGradients
from ampwise.report.run_facts import optimizer_names, passes_per_step
from ampwise.runs.reader import Run
from ampwise.runs.rows import METRICS, SKIP_RATE_STEPS, LayerSample, NumberStats

POINTS = 3000  # per line: three times what a screen shows, so that zooming in shows more
MOST_LINES = 6  # optimizers
MOST_LAYERS = 400
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")  # that gradients may be kept in
COLUMNS = 160  # columns of a heat map; more samples are merged
PER_MILLION = 10**6  # lost shares are integers in these units: short as text, and a small share is not zero
PER_POWER = 256  # logarithms are integers in these fractions of a power of two: three digits of the number


def chart_data(run: Run, layers: Sequence[LayerGradients]) -> dict[str, Any]:
    """Return the chart data of one run and its layers."""
    shown = shown_layers(layers)
    several = len({layer.optimizer for layer in layers}) > 1
    # What the numbers below the histogram are, and what they cannot show.
    about = "Shares of the nonzero gradients, over all sampled steps: unscaled gradients times the loss scale."
    if layers and layers[0].underflow is not None:
        about += (
            " Gradients that FP16 had already flushed to zero count as zeros here: no larger scale brings them back."
        )
    formats = [  # their limits, as the census uses them
        {
            "name": name,
            "label": name.upper(),
            "flush": fmt.flush_exponent,
            "lowest": fmt.lowest_exponent,
            "overflow_binade": fmt.overflow_binade,
            "overflow": fmt.overflow_threshold,
            "overflow_at": fmt.overflow_at_threshold,
        }
        for name in FORMATS
        for fmt in [find_scalar_format(name)]
    ]
    histograms = []
    for layer in shown:
        census = layer.census
        lowest, highest = min(census.binades, default=0), max(census.binades, default=-1)
        histogram = {
            "name": printable(layer.name_and_owner if several else layer.name),
            "exponent": layer.exponent,
            "exact": layer.scale is None or layer.scale == 2.0**layer.exponent,
            "lowest": lowest,
            "counts": [census.binades.get(exponent, 0) for exponent in range(lowest, highest + 1)],
            "zeros": census.zeros,
            "infs": census.infs,
            "nans": census.nans,
            "amin": census.amin,
            "amax": census.amax,
            "steps": layer.steps,
        }
        histograms.append(histogram)
    drawn, passes = curves_of(curves(run)), passes_per_step(run)
    if passes > 1:
        drawn["titles"]["loss"] = f"Loss, sum of {passes} backward passes"
    return {
        **drawn,
        "formats": formats,
        "format": layers[0].fmt.name if layers and layers[0].fmt.name in FORMATS else FORMATS[0],
        "layers": histograms,
        "about_fates": about,
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


# --- curves --------------------------------------------------------------------------------------------------------


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
    found = []
    for optimizer, points in lines:
        owner = names.get(optimizer, f"optimizer {optimizer}") if len(lines) > 1 or not which else ""
        line: dict[str, Any] = {
            "name": printable(": ".join(part for part in (which, owner) if part)),
            "run": which,
            "first": [point.first for point in points],
            "last": [point.last for point in points],
            "skipped": [point.skipped for point in points],
            "skip_rate": _rounded(skip_rates(points)),
        }
        for metric in METRICS:
            stats: list[NumberStats] = [getattr(point, metric) for point in points]
            write = list if metric == "scale" else _rounded  # powers of two are not rounded
            mean, low, high = (write(getattr(each, part) for each in stats) for part in ("mean", "low", "high"))
            values = {
                "mean": mean,
                **({} if low == mean == high else {"low": low, "high": high}),  # some points have several steps
                "bad": {place: each.bad for place, each in enumerate(stats) if each.bad},
            }
            line[metric] = values if any(each.known for each in stats) else None
        found.append(line)
    return found


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to six digits, which are more than a screen shows."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]


# --- heat maps -----------------------------------------------------------------------------------------------------

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
    global _CACHE
    names = optimizer_names(run)
    was_fp16 = any(layer.underflow is not None for layer in layers)
    keys = [(id(sample), was_fp16) for sample in run.layers]
    _CACHE = {key: _CACHE.get(key, (sample, {})) for key, sample in zip(keys, run.layers, strict=True)}
    maps = []
    for optimizer in sorted({layer.optimizer for layer in layers}):
        shown = {layer.name: place for place, layer in enumerate(layers) if layer.optimizer == optimizer}
        samples = [sample for sample in run.layers if sample.optimizer == optimizer]
        name = printable(names.get(optimizer, f"optimizer {optimizer}"))
        about = {"name": name, "was_fp16": was_fp16, "per_power": PER_POWER, "per_million": PER_MILLION}
        maps.append(about | _map(samples, shown, was_fp16))
    return maps


# The samples of the run that was drawn last, with their cells, by id. A live page is drawn again for every new sample;
# all earlier ones are the same objects as before, and computing a cell takes much longer than using it.
_CACHE: dict[tuple[int, bool], tuple[LayerSample, dict[str, HeatCell]]] = {}


def _map(samples: Sequence[LayerSample], shown: dict[str, int], was_fp16: bool) -> dict[str, Any]:
    names = [name for name in dict.fromkeys(name for one in samples for name in one.layers) if name in shown]
    size = max(1, -(-len(samples) // COLUMNS))
    columns = [samples[start : start + size] for start in range(0, len(samples), size)]
    exponents = [[scale_exponent(one.scale) for one in column if one.scale is not None] for column in columns]
    cells = [
        [[_cell(one, name, was_fp16) for one in column if name in one.layers] for column in columns] for name in names
    ]

    def extremes(what: str, extreme: Callable[..., int]) -> list[list[Value]]:
        return [[_extreme([getattr(cell, what) for cell in place], extreme) for place in row] for row in cells]

    lost, lost_low = extremes("lost", max), extremes("lost", min)
    return {
        "rows": [shown[name] for name in names],
        "first": [column[0].first for column in columns],
        "last": [column[-1].last for column in columns],
        "exponent": [min(some, default=None) for some in exponents],
        "exponent_high": [max(some, default=None) for some in exponents],
        "samples": len(samples),
        "steps": sum(one.steps for one in samples),
        "merged": any(len(column) > 1 or column[0].steps > 1 for column in columns),
        "lost": lost,
        **({} if lost_low == lost else {"lost_low": lost_low}),
        "norm": extremes("norm", max),
        "largest": extremes("largest", max),
    }


def _cell(sample: LayerSample, name: str, was_fp16: bool) -> HeatCell:
    cells, census = _CACHE[id(sample), was_fp16][1], sample.layers[name]
    if name not in cells and not census.finite:
        cells[name] = HeatCell(BAD, BAD, BAD)
    if name in cells:
        return cells[name]
    lost: Value = ZERO
    if nonzeros := census.nonzeros:
        share = underflow(census, sample.scale).lost_share if was_fp16 else census.flushed("fp16").low / nonzeros
        lost = math.ceil(share * PER_MILLION)
    norm, largest = (
        round(math.log2(value) * PER_POWER) if 0 < value < math.inf else ZERO
        for value in (census.norm / math.sqrt(max(1, sample.steps)), census.amax)
    )
    cells[name] = HeatCell(lost, norm, largest)
    return cells[name]


def _extreme(values: Sequence[Value], extreme: Callable[..., int]) -> Value:
    """Return the extreme of the values; BAD if any of them has an inf or NaN."""
    if len(values) == 1:
        return values[0]
    if BAD in values:
        return BAD
    numbers = [value for value in values if isinstance(value, int)]
    return extreme(numbers) if numbers else ZERO if ZERO in values else NONE
