"""Data types of a record: a step, a sample of the layers, a finding with its count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampwise.finding import Finding
from ampwise.numbers.census.algebra import Census

__all__ = ["SKIP_RATE_STEPS", "CountedFinding", "LayerSample", "StepRow"]

SKIP_RATE_STEPS = 100  # steps over which the skip rate is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one optimizer. None: unknown, or not measured."""

    optimizer: int = 0  # index, in order of first use
    step: int  # of this optimizer, from 1; skipped steps count
    seconds: float = 0.0  # since the start of the run
    loss: float | None = None  # unscaled, summed over the step's backward passes
    scale: float | None = None  # loss scale of these gradients; None without a scaler
    norm: float | None = None  # of all gradients, unscaled, before clipping
    skipped: bool = False
    lr: float | None = None

    @property
    def finite(self) -> bool:
        """Whether neither loss nor norm is known to be inf or NaN."""
        return all(value is None or math.isfinite(value) for value in (self.loss, self.norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """Census of each parameter's unscaled gradients at a step, or summed over several steps."""

    optimizer: int = 0
    first: int  # step
    last: int
    steps: int = 1  # how many were added up
    scale: float | None = None  # the largest loss scale; None without a scaler
    layers: Mapping[str, Census]  # by parameter, in the order of the optimizer

    def __add__(self, other: LayerSample) -> LayerSample:
        """Merge two samples by adding their censuses."""
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
class CountedFinding:
    """A finding with how often and when it occurred."""

    finding: Finding
    count: int = 1
    first_step: int | None = None
    last_step: int | None = None
    ranks: list[int] = field(default_factory=list)
    excerpt: dict[str, Any] = field(default_factory=dict)  # {"first_line": 12, "lines": ["...", ...]}
    diff: str = ""  # unified diff that fixes it in the script as it ran; empty if there is none
    diff_is_safe: bool = True  # the diff changes nothing but the mistake
