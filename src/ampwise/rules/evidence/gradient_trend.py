"""Gradient magnitude along the depth of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.trend import mann_kendall

__all__ = ["DepthTrend", "gradient_trend"]

LAYERS = 8  # weights, so that a quarter has at least two
SAMPLES = 3
SURE = 2.0  # standard deviations of the Mann-Kendall statistic: the trend along the depth is consistent


@dataclass(frozen=True, slots=True)
class DepthTrend:
    """Gradient magnitude in the first layers compared to the last."""

    first_layer: str
    layers: int
    first: float  # RMS of the nonzero values; the median of a quarter of the layers
    last: float
    steady: float  # above zero: gradients shrink towards the output; below: they grow

    @property
    def ratio(self) -> float:
        return self.first / self.last


def gradient_trend(health: GradientHealth) -> DepthTrend | None:
    """Return the trend along the depth; None if the layer order is unknown, too few layers were measured, or there is
    no trend.
    """
    if health.samples < SAMPLES:
        return None
    layers = health.recent_layers
    order = [name for name in health.in_forward_order if name in layers and layers[name].sum_squares > 0]
    weights = [name for name in order if name.endswith("weight")]
    chosen = weights if len(weights) >= LAYERS else order  # biases have different magnitudes
    if len(chosen) < LAYERS:
        return None
    sizes = [math.sqrt(layers[name].sum_squares / layers[name].nonzeros) for name in chosen]
    steady = -mann_kendall(sizes)
    quarter = len(sizes) // 4
    if abs(steady) < SURE or not all(map(math.isfinite, sizes)):
        return None
    return DepthTrend(chosen[0], len(chosen), median(sizes[:quarter]), median(sizes[-quarter:]), steady)
