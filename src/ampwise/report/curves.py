"""Reduce a run's steps to as many points as a chart can show, keeping every minimum, maximum and skipped step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from ampwise.runs.rows import SKIP_RATE_STEPS, StepBucket, merge_buckets


def by_optimizer(buckets: Sequence[StepBucket]) -> dict[int, list[StepBucket]]:
    """Group buckets by optimizer, in the order of their steps."""
    lines: dict[int, list[StepBucket]] = {}
    for bucket in sorted(buckets, key=lambda bucket: (bucket.optimizer, bucket.first)):
        lines.setdefault(bucket.optimizer, []).append(bucket)
    return lines


def thin_out(buckets: Sequence[StepBucket], most: int) -> list[StepBucket]:
    """Merge buckets to at most ``most`` per optimizer, over equal ranges of steps, sorted by optimizer and step."""
    thinned: list[StepBucket] = []
    for line in by_optimizer(buckets).values():
        if len(line) <= most:
            thinned += line
            continue
        start, span = line[0].first, line[-1].first + 1 - line[0].first
        places = ((bucket.first - start) * most // span for bucket in line)
        groups = itertools.groupby(zip(places, line, strict=True), key=lambda pair: pair[0])
        thinned += [merge_buckets([bucket for _, bucket in group]) for _, group in groups]
    return thinned


def skip_rates(line: Sequence[StepBucket]) -> list[float]:
    """Return, for each bucket of one optimizer, the share of skipped steps.

    The share is taken over the last SKIP_RATE_STEPS steps, or over the bucket's own if it has more.

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
