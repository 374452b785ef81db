"""A step, or several that stand together: what is kept of them when a run gets long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.record.rows import StepRow

__all__ = ["NOTHING", "Bucket", "Spread", "together"]


class Spread(NamedTuple):
    """What a number did over some steps: its extremes and mean where it was finite, and how often it was not."""

    low: float | None = None  # None, as the mean and the other extreme, where it was never finite
    mean: float | None = None
    high: float | None = None
    finite: int = 0  # steps at which it was known, and finite
    nans: int = 0
    infs: int = 0
    negative_infs: int = 0

    @classmethod
    def of(cls, value: float | None) -> Spread:
        """Of one step.

        >>> Spread.of(2.5).high, Spread.of(float("nan")).nans, Spread.of(None).known
        (2.5, 1, 0)
        """
        if value is None:
            return NOTHING
        if math.isfinite(value):
            return cls(value, value, value, 1)
        if math.isnan(value):
            return cls(nans=1)
        return cls(infs=1) if value > 0 else cls(negative_infs=1)

    @property
    def known(self) -> int:
        """Steps at which there was a number, finite or not."""
        return self.finite + self.bad

    @property
    def bad(self) -> int:
        """Steps at which it was inf or NaN."""
        return self.nans + self.infs + self.negative_infs

    @classmethod
    def over(cls, parts: Sequence[Spread]) -> Spread:
        """Of all the steps of ``parts``."""
        lows, means, highs, finite, nans, infs, negative_infs = zip(*parts, strict=True)
        total = sum(finite)
        counts = (total, sum(nans), sum(infs), sum(negative_infs))
        if not total:
            return cls(None, None, None, *counts)
        low = min(low for low in lows if low is not None)
        high = max(high for high in highs if high is not None)
        # Weights first: a sum of numbers near FP64's end would leave its range.
        mean = sum(mean * (count / total) for mean, count in zip(means, finite, strict=True) if mean is not None)
        return cls(low, min(max(mean, low), high), high, *counts)


NOTHING = Spread()  # not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some steps of one optimizer that follow each other; ``count`` is 1 for a step that is kept as it was."""

    optimizer: int = 0
    first: int  # step
    last: int
    count: int = 1
    skipped: int = 0  # steps of these
    began: float = 0.0  # seconds since the run began, at the first step
    ended: float = 0.0  # and at the last
    loss: Spread = NOTHING
    norm: Spread = NOTHING
    scale: Spread = NOTHING
    lr: Spread = NOTHING

    @classmethod
    def of(cls, row: StepRow) -> Bucket:
        """One step."""
        return cls(
            optimizer=row.optimizer,
            first=row.step,
            last=row.step,
            skipped=int(row.skipped),
            began=row.seconds,
            ended=row.seconds,
            loss=Spread.of(row.loss),
            norm=Spread.of(row.norm),
            scale=Spread.of(row.scale),
            lr=Spread.of(row.lr),
        )

    @property
    def finite(self) -> bool:
        """Neither loss nor norm is known to have been inf or NaN at any of the steps."""
        return not (self.loss.bad or self.norm.bad)

    def __add__(self, other: Bucket) -> Bucket:
        return together((self, other))


def together(parts: Sequence[Bucket]) -> Bucket:
    """Buckets of one optimizer as one, in the order of their steps."""
    if len(parts) == 1:
        return parts[0]
    return Bucket(
        optimizer=parts[0].optimizer,
        first=min(part.first for part in parts),
        last=max(part.last for part in parts),
        count=sum(part.count for part in parts),
        skipped=sum(part.skipped for part in parts),
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        loss=Spread.over([part.loss for part in parts]),
        norm=Spread.over([part.norm for part in parts]),
        scale=Spread.over([part.scale for part in parts]),
        lr=Spread.over([part.lr for part in parts]),
    )
