"""Steady changes, along the depth of a model or over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

PART = 0.1  # of the whole change, at least, from each quarter to the next: a jump has none in two of the three
LAYERS = 8  # weights, so that a quarter has at least two
SAMPLES = 3


def depth_change(health: GradientHealth) -> tuple[str | None, dict[str, float]]:
    """Return the first layer, and the RMS of the nonzero gradients in the first quarter of the weights and in the last.

    None for the layer if the order is unknown, too few layers were measured, or the change along the depth is not
    steady.
    """
    layers = health.recent_layers if health.samples >= SAMPLES else {}
    order = [name for name in health.names if name in layers and layers[name].sum_squares > 0]
    weights = [name for name in order if name.endswith("weight")]
    chosen = weights if len(weights) >= LAYERS else order  # biases have different magnitudes
    sizes = [math.sqrt(layers[name].sum_squares / layers[name].nonzeros) for name in chosen]
    enough = len(chosen) >= LAYERS and all(map(math.isfinite, sizes))
    quarters = steady_quarters([math.log2(size) for size in sizes]) if enough else None
    if quarters is None:
        return None, {}
    first, last = 2.0 ** quarters[0], 2.0 ** quarters[-1]
    return chosen[0], {"first_rms": first, "last_rms": last, "ratio": first / last, "weights": len(chosen)}


def steady_quarters(values: Sequence[float]) -> list[float] | None:
    """Return the medians of the four quarters, if each differs from the one before by a fair part of the whole change.

    None for noise, a jump, or a change that has ended.

    >>> steady_quarters([1, 2, 3, 4, 5, 6, 7, 8]), steady_quarters([1, 1, 1, 1, 8, 8, 8, 8])
    ([1.5, 3.5, 5.5, 7.5], None)
    """
    bounds = [len(values) * part // 4 for part in range(5)]
    medians = [float(median(values[start:stop])) for start, stop in pairwise(bounds)]
    whole = medians[-1] - medians[0]
    steady = whole and all((later - earlier) / whole >= PART for earlier, later in pairwise(medians))
    return medians if steady else None
