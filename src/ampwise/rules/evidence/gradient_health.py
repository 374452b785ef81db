"""Statistics of one optimizer's gradients, losses and loss scale, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.numbers.census.algebra import Census
from ampwise.rules.evidence.spikes import SpikeDetector
from ampwise.rules.evidence.streaks import BadStep, Streak, Streaks
from ampwise.rules.evidence.trend import Series
from ampwise.rules.evidence.underflow import Underflow, underflow

if TYPE_CHECKING:  # ampwise.runs is a higher layer; only its types are used here
    from ampwise.rules.evidence.rows import LayerSample, StepRow

__all__ = ["SEARCH", "BadStep", "GradientHealth", "UpdateCounts"]

SEARCH = 50  # initial steps in which a scaler searches its scale: 2**24 down to 1 and back takes half of them
WINDOW = 200  # recent steps that rules about the scale examine
RECENT_SAMPLES = 8
RECENT_UPDATES = 8


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Number of weights with a nonzero gradient, and how many of them an update changed."""

    moved: int
    tried: int

    def __add__(self, other: UpdateCounts) -> UpdateCounts:
        return UpdateCounts(self.moved + other.moved, self.tried + other.tried)


class GradientHealth:
    """State that the rules about gradients examine.

    precision: of the training forward passes, "fp16", "bf16" or "fp32". names: the parameters in forward order, if
    known. The other arguments are the scaler's settings. All of them may be set later.
    """

    def __init__(
        self,
        optimizer: int = 0,
        *,
        precision: str = "fp32",
        names: Sequence[str] = (),
        growth_interval: int | None = None,
        backoff_factor: float | None = None,
        growth_factor: float | None = None,
        init_scale: float | None = None,
    ) -> None:
        self.optimizer, self.precision, self.names = optimizer, precision, names
        self.growth_interval, self.growth_factor = growth_interval, growth_factor
        self.backoff_factor, self.init_scale = backoff_factor, init_scale
        # Steps
        self.steps = 0
        self.last_step: int | None = None
        self.lr: float | None = None
        self.first_scale: float | None = None
        self.scale: float | None = None  # at the last step
        self.settled_scale: float | None = None  # at the end of the initial search, or so far
        self.search_skips = 0
        self.window: deque[StepRow] = deque(maxlen=WINDOW)  # after the search
        self.norms = Series(recent=48, old=64)  # finite norms, unscaled
        self.losses = SpikeDetector()
        self.streaks = Streaks()
        # Samples
        self.samples = 0
        self.recent: deque[LayerSample] = deque(maxlen=RECENT_SAMPLES)
        self.values: dict[str, int] = {}  # in all samples
        self.zeros: dict[str, int] = {}
        self._merged: Mapping[str, Census] = {}
        self._merged_at = 0
        self.underflows: dict[str, Underflow] = {}  # of the last sample
        self.margins: dict[str, Series] = {}
        self.amaxes = Series()  # log2 of the largest gradient
        # Updates
        self.updates: deque[Mapping[str, UpdateCounts]] = deque(maxlen=RECENT_UPDATES)

    def add_step(self, row: StepRow) -> None:
        """Add a step; call for every step, in order."""
        self.steps += 1
        self.last_step, self.lr = row.step, row.lr
        self._add_scale(row)
        if row.skipped or not row.finite:
            self.streaks.add_bad(row.step, row.loss, row.scale)
        else:
            self.streaks.add_good(row.step, row.scale, row.norm)
            if row.norm is not None:
                self.norms.add(row.step, row.norm)
        if row.loss is not None and math.isfinite(row.loss):
            self.losses.add(row.step, row.loss)

    def _add_scale(self, row: StepRow) -> None:
        if self.first_scale is None:
            self.first_scale = row.scale
        self.scale = row.scale
        if self.steps <= SEARCH:
            self.settled_scale = row.scale
            self.search_skips += row.skipped
        else:
            self.window.append(row)

    def add_sample(self, sample: LayerSample) -> None:
        """Add a sample, taken every n-th step: an unscaled census for each parameter."""
        self.samples += 1
        self.recent.append(sample)
        for name, census in sample.layers.items():
            self.values[name] = self.values.get(name, 0) + census.count
            self.zeros[name] = self.zeros.get(name, 0) + census.zeros
            if census.finite:  # in any precision, which may become known later
                self._add_underflow(name, census, sample)
        amax = max((census.amax for census in sample.layers.values() if census.finite), default=0.0)
        if amax:
            self.amaxes.add(sample.last, math.log2(amax))

    def _add_underflow(self, name: str, census: Census, sample: LayerSample) -> None:
        found = underflow(census, sample.scale)
        self.underflows[name] = found
        if found.margin is not None:
            self.margins.setdefault(name, Series()).add(sample.last, found.margin)

    def add_updates(self, step: int, shares: Mapping[str, UpdateCounts]) -> None:
        """Add what a step's update changed; steps with a learning rate of zero are ignored."""
        if self.last_step != step or self.lr != 0:
            self.updates.append(shares)

    def add_bad(self, bad: BadStep) -> None:
        """Add the details of a bad step; before or after its row."""
        self.streaks.add_details(bad)

    @property
    def recent_layers(self) -> Mapping[str, Census]:
        """The last few samples merged, without gradients that were not finite."""
        if self._merged_at != self.samples:  # several rules use it
            self._merged, self._merged_at = self._merge(), self.samples
        return self._merged

    def _merge(self) -> dict[str, Census]:
        layers: dict[str, Census] = {}
        for sample in self.recent:
            for name, census in sample.layers.items():
                if census.finite:
                    layers[name] = layers.get(name, Census()) + census
        return layers

    @property
    def in_forward_order(self) -> list[str]:
        """Names of the measured parameters in forward order; empty if the order is unknown."""
        return [name for name in self.names if name in self.values]

    def last_forward(self, parameters: Sequence[str]) -> str | None:
        """Return which of them is last in the forward pass, and so first in the backward pass."""
        order = {name: place for place, name in enumerate(self.names)}
        known = [name for name in parameters if name in order]
        return max(known, key=order.__getitem__) if known else next(reversed(parameters), None)

    def real_streaks(self) -> list[Streak]:
        """Return the streaks of bad steps that a lower scale does not fix."""
        return [streak for streak in self.streaks.all if streak.is_real(self.precision)]
