"""Buckets: one step, or several consecutive steps merged when a run gets long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.runs.rows import StepRow

__all__ = ["NO_STATS", "NumberStats", "StepBucket", "merge_buckets"]


class NumberStats(NamedTuple):
    """Statistics of a number over some steps: minimum, mean and maximum of its finite values, and counts."""

    low: float | None = None  # None if there is no finite value, as mean and high
    mean: float | None = None
    high: float | None = None
    finite: int = 0  # steps with a finite value
    nans: int = 0
    infs: int = 0
    negative_infs: int = 0

    @classmethod
    def of(cls, value: float | None) -> NumberStats:
        """Return the statistics of a single value.

        >>> NumberStats.of(2.5).high, NumberStats.of(float("nan")).nans, NumberStats.of(None).known
        (2.5, 1, 0)
        """
        if value is None:
            return NO_STATS
        if math.isfinite(value):
            return cls(value, value, value, 1)
        if math.isnan(value):
            return cls(nans=1)
        return cls(infs=1) if value > 0 else cls(negative_infs=1)

    @property
    def known(self) -> int:
        """Steps with a value, finite or not."""
        return self.finite + self.bad

    @property
    def bad(self) -> int:
        """Steps with inf or NaN."""
        return self.nans + self.infs + self.negative_infs

    @classmethod
    def over(cls, parts: Sequence[NumberStats]) -> NumberStats:
        """Merge the statistics of several parts."""
        lows, means, highs, finite, nans, infs, negative_infs = zip(*parts, strict=True)
        total = sum(finite)
        counts = (total, sum(nans), sum(infs), sum(negative_infs))
        if not total:
            return cls(None, None, None, *counts)
        low = min(low for low in lows if low is not None)
        high = max(high for high in highs if high is not None)
        # Multiply by weights first: a sum of very large numbers would overflow FP64.
        mean = sum(mean * (count / total) for mean, count in zip(means, finite, strict=True) if mean is not None)
        return cls(low, min(max(mean, low), high), high, *counts)


NO_STATS = NumberStats()  # no value known


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBucket:
    """Consecutive steps of one optimizer; ``count`` is 1 for a single step."""

    optimizer: int = 0
    first: int  # step
    last: int
    count: int = 1
    skipped: int = 0  # how many were skipped
    began: float = 0.0  # seconds since the start of the run, at the first step
    ended: float = 0.0  # the same at the last step
    loss: NumberStats = NO_STATS
    norm: NumberStats = NO_STATS
    scale: NumberStats = NO_STATS
    lr: NumberStats = NO_STATS

    @classmethod
    def of(cls, row: StepRow) -> StepBucket:
        """Return the bucket of one step."""
        return cls(
            optimizer=row.optimizer,
            first=row.step,
            last=row.step,
            skipped=int(row.skipped),
            began=row.seconds,
            ended=row.seconds,
            loss=NumberStats.of(row.loss),
            norm=NumberStats.of(row.norm),
            scale=NumberStats.of(row.scale),
            lr=NumberStats.of(row.lr),
        )

    @property
    def finite(self) -> bool:
        """Whether neither loss nor norm is known to be inf or NaN at any of the steps."""
        return not (self.loss.bad or self.norm.bad)

    def __add__(self, other: StepBucket) -> StepBucket:
        return merge_buckets((self, other))


def merge_buckets(parts: Sequence[StepBucket]) -> StepBucket:
    """Merge buckets of one optimizer, given in the order of their steps."""
    if len(parts) == 1:
        return parts[0]
    return StepBucket(
        optimizer=parts[0].optimizer,
        first=min(part.first for part in parts),
        last=max(part.last for part in parts),
        count=sum(part.count for part in parts),
        skipped=sum(part.skipped for part in parts),
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        loss=NumberStats.over([part.loss for part in parts]),
        norm=NumberStats.over([part.norm for part in parts]),
        scale=NumberStats.over([part.scale for part in parts]),
        lr=NumberStats.over([part.lr for part in parts]),
    )
