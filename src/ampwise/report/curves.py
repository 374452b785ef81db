"""Reduce a run's steps to as many points as a chart can show, keeping every minimum, maximum and skipped step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from ampwise.runs.bucket import NumberStats, StepBucket, merge_buckets
from ampwise.runs.rows import SKIP_RATE_STEPS

__all__ = ["METRICS", "by_optimizer", "plain", "skip_rates", "spread_of", "thin_out"]

METRICS = ("loss", "norm", "scale", "lr")


def by_optimizer(buckets: Sequence[StepBucket]) -> dict[int, list[StepBucket]]:
    """Group buckets by optimizer, in the order of their steps."""
    lines: dict[int, list[StepBucket]] = {}
    for bucket in sorted(buckets, key=lambda bucket: (bucket.optimizer, bucket.first)):
        lines.setdefault(bucket.optimizer, []).append(bucket)
    return lines


def thin_out(buckets: Sequence[StepBucket], most: int) -> list[StepBucket]:
    """Merge buckets to at most ``most`` per optimizer, over equal ranges of steps, sorted by optimizer and step."""
    return [bucket for line in by_optimizer(buckets).values() for bucket in _thin_line(line, most)]


def skip_rates(line: Sequence[StepBucket]) -> list[float]:
    """Return, for each bucket of one optimizer, the share of skipped steps.

    The share is taken over the last SKIP_RATE_OVER steps, or over the bucket's own if it has more.

    >>> skip_rates([StepBucket(first=1, last=1, skipped=1), StepBucket(first=2, last=2)])
    [1.0, 0.5]
    """
    rates, window, steps, skipped = [], deque[StepBucket](), 0, 0
    for bucket in line:
        window.append(bucket)
        steps, skipped = steps + bucket.count, skipped + bucket.skipped
        while len(window) > 1 and steps - window[0].count >= SKIP_RATE_STEPS:
            gone = window.popleft()
            steps, skipped = steps - gone.count, skipped - gone.skipped
        rates.append(skipped / steps)
    return rates


def spread_of(bucket: StepBucket, metric: str) -> NumberStats:
    """Return the spread of one of METRICS in a bucket."""
    found: NumberStats = getattr(bucket, metric)
    return found


def plain(bucket: StepBucket) -> dict[str, Any]:
    """Return plain data for JSON: extremes, mean and number of values not finite of each metric; None if unknown."""
    steps = {name: getattr(bucket, name) for name in ("optimizer", "first", "last", "count", "skipped")}
    return steps | {metric: _plain_spread(spread_of(bucket, metric)) for metric in METRICS}


def _plain_spread(spread: NumberStats) -> dict[str, Any] | None:
    if not spread.known:
        return None
    return {"low": spread.low, "mean": spread.mean, "high": spread.high, "not_finite": spread.bad}


def _thin_line(line: list[StepBucket], most: int) -> list[StepBucket]:
    if len(line) <= most:
        return line
    start, stop = line[0].first, line[-1].first + 1
    groups = itertools.groupby(line, key=lambda bucket: (bucket.first - start) * most // (stop - start))
    return [merge_buckets(list(group)) for _, group in groups]
