"""What a record is made of: a row for a step, a sample of layers, a finding with its count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampwise.census.algebra import Census
from ampwise.finding import Finding

__all__ = ["SKIP_RATE_OVER", "LayerSample", "Seen", "StepRow"]

SKIP_RATE_OVER = 100  # steps: the share that was skipped is told of the last so many


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one optimizer. None: not known, or not measured."""

    optimizer: int = 0  # which, in the order they were first met
    step: int  # of this optimizer, from 1 on; a skipped step counts
    seconds: float = 0.0  # since the run began
    loss: float | None = None  # what the step descends: the sum over its backward passes, without the loss scale
    scale: float | None = None  # that these gradients were multiplied by; None without a scaler
    norm: float | None = None  # of all gradients, in true units, before clipping
    skipped: bool = False
    lr: float | None = None

    @property
    def finite(self) -> bool:
        """Neither loss nor norm is known to be inf or NaN."""
        return all(value is None or math.isfinite(value) for value in (self.loss, self.norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """What the gradients of each parameter held at a step, in true units; or at several steps, added up."""

    optimizer: int = 0
    first: int  # step
    last: int
    steps: int = 1  # how many were added up
    scale: float | None = None  # the largest of them; None without a scaler
    layers: Mapping[str, Census]  # by parameter, in the order of the optimizer

    def __add__(self, other: LayerSample) -> LayerSample:
        """The two as one sample: censuses add up."""
        names = dict.fromkeys([*self.layers, *other.layers])
        scales = [scale for scale in (self.scale, other.scale) if scale is not None]
        return LayerSample(
            optimizer=self.optimizer,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            steps=self.steps + other.steps,
            scale=max(scales, default=None),
            layers={name: self.layers.get(name, Census()) + other.layers.get(name, Census()) for name in names},
        )


@dataclass(slots=True, kw_only=True)
class Seen:
    """A finding, how often, and when."""

    finding: Finding
    count: int = 1
    first_step: int | None = None
    last_step: int | None = None
    ranks: list[int] = field(default_factory=list)
    excerpt: dict[str, Any] = field(default_factory=dict)  # {"first_line": 12, "lines": ["...", ...]}
    diff: str = ""  # what mends it in the script as it ran, as a unified diff; empty where nobody knows
    diff_is_safe: bool = True  # it changes nothing but the mistake
