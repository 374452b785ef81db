"""How large gradients are along the depth of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ampwise.evidence.health import Health
from ampwise.evidence.trend import mann_kendall

__all__ = ["Depth", "depth"]

LAYERS = 8  # weights, so that a quarter has two
SAMPLES = 3
SURE = 2.0  # standard deviations of Mann and Kendall's statistic: it goes one way along the depth, by and large


@dataclass(frozen=True, slots=True)
class Depth:
    """The size of gradients in the first layers against that in the last."""

    first_layer: str
    layers: int
    first: float  # root of the mean square, of values that are not zero; the median of a quarter
    last: float
    steady: float  # above zero: it shrinks on the way to the output; below: it grows

    @property
    def ratio(self) -> float:
        return self.first / self.last


def depth(health: Health) -> Depth | None:
    """None where the order of layers is not known, too few were measured, or the sizes follow no order."""
    if health.samples < SAMPLES:
        return None
    layers = health.recent_layers
    order = [name for name in health.in_forward_order if name in layers and layers[name].sum_squares > 0]
    weights = [name for name in order if name.endswith("weight")]
    chosen = weights if len(weights) >= LAYERS else order  # biases are of another size by their nature
    if len(chosen) < LAYERS:
        return None
    sizes = [math.sqrt(layers[name].sum_squares / layers[name].nonzeros) for name in chosen]
    steady = -mann_kendall(sizes)
    quarter = len(sizes) // 4
    if abs(steady) < SURE or not all(map(math.isfinite, sizes)):
        return None
    return Depth(chosen[0], len(chosen), median(sizes[:quarter]), median(sizes[-quarter:]), steady)
