"""A run's steps in as many points as a picture or a person can take, with no minimum, maximum or skip lost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from ampwise.record.bucket import Bucket, Spread, together
from ampwise.record.rows import SKIP_RATE_OVER

__all__ = ["METRICS", "by_optimizer", "plain", "skip_rates", "spread_of", "thinned"]

METRICS = ("loss", "norm", "scale", "lr")


def by_optimizer(buckets: Sequence[Bucket]) -> dict[int, list[Bucket]]:
    """The buckets of each optimizer, in order of their steps."""
    lines: dict[int, list[Bucket]] = {}
    for bucket in sorted(buckets, key=lambda bucket: (bucket.optimizer, bucket.first)):
        lines.setdefault(bucket.optimizer, []).append(bucket)
    return lines


def thinned(buckets: Sequence[Bucket], most: int) -> list[Bucket]:
    """At most ``most`` buckets an optimizer, over equal stretches of steps, in the order of optimizers and steps."""
    return [bucket for line in by_optimizer(buckets).values() for bucket in _thin_line(line, most)]


def skip_rates(line: Sequence[Bucket]) -> list[float]:
    """At each bucket of one optimizer the share skipped of the last SKIP_RATE_OVER steps, or of its own if it has more.

    >>> skip_rates([Bucket(first=1, last=1, skipped=1), Bucket(first=2, last=2)])
    [1.0, 0.5]
    """
    rates, window, steps, skipped = [], deque[Bucket](), 0, 0
    for bucket in line:
        window.append(bucket)
        steps, skipped = steps + bucket.count, skipped + bucket.skipped
        while len(window) > 1 and steps - window[0].count >= SKIP_RATE_OVER:
            gone = window.popleft()
            steps, skipped = steps - gone.count, skipped - gone.skipped
        rates.append(skipped / steps)
    return rates


def spread_of(bucket: Bucket, metric: str) -> Spread:
    """One of METRICS."""
    found: Spread = getattr(bucket, metric)
    return found


def plain(bucket: Bucket) -> dict[str, Any]:
    """Plain data for JSON: each metric as its extremes, its mean and how often it was not finite; None if not known."""
    steps = {name: getattr(bucket, name) for name in ("optimizer", "first", "last", "count", "skipped")}
    return steps | {metric: _plain_spread(spread_of(bucket, metric)) for metric in METRICS}


def _plain_spread(spread: Spread) -> dict[str, Any] | None:
    if not spread.known:
        return None
    return {"low": spread.low, "mean": spread.mean, "high": spread.high, "not_finite": spread.bad}


def _thin_line(line: list[Bucket], most: int) -> list[Bucket]:
    if len(line) <= most:
        return line
    start, stop = line[0].first, line[-1].first + 1
    groups = itertools.groupby(line, key=lambda bucket: (bucket.first - start) * most // (stop - start))
    return [together(list(group)) for _, group in groups]
