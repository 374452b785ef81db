"""Data types of a record: a step, several merged steps, a sample of the layers, a finding with its count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ampwise.finding import Finding
from ampwise.numbers.census.algebra import Census

METRICS = ("loss", "norm", "scale", "lr")  # numbers of a step
SKIP_RATE_STEPS = 100  # steps over which the skip rate is computed
LONGEST_CHAIN = 8  # of a cause, its consequence, the consequence of that ...


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
        stats: dict[str, Any] = {metric: NumberStats.of(getattr(row, metric)) for metric in METRICS}
        return cls(
            optimizer=row.optimizer,
            first=row.step,
            last=row.step,
            skipped=int(row.skipped),
            began=row.seconds,
            ended=row.seconds,
            **stats,
        )

    @property
    def finite(self) -> bool:
        """Whether neither loss nor norm is known to be inf or NaN at any of the steps."""
        return not (self.loss.bad or self.norm.bad)

    def __add__(self, other: StepBucket) -> StepBucket:
        return merge_buckets((self, other))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: extremes, mean and count of values not finite of each metric; None if unknown."""
        data = {name: getattr(self, name) for name in ("optimizer", "first", "last", "count", "skipped")}
        for metric in METRICS:
            stats: NumberStats = getattr(self, metric)
            parts = {"low": stats.low, "mean": stats.mean, "high": stats.high, "not_finite": stats.bad}
            data[metric] = parts if stats.known else None
        return data


def merge_buckets(parts: Sequence[StepBucket]) -> StepBucket:
    """Merge buckets of one optimizer, given in the order of their steps."""
    if len(parts) == 1:
        return parts[0]
    stats: dict[str, Any] = {metric: NumberStats.over([getattr(part, metric) for part in parts]) for metric in METRICS}
    return StepBucket(
        optimizer=parts[0].optimizer,
        first=min(part.first for part in parts),
        last=max(part.last for part in parts),
        count=sum(part.count for part in parts),
        skipped=sum(part.skipped for part in parts),
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        **stats,
    )


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
    consequences: list[CountedFinding] = field(default_factory=list)  # findings that this one explains

    @property
    def names_the_cause(self) -> bool:
        """Whether it says where a bad value arose, or its evidence shows what it has led to."""
        return self.finding.rule.names_the_cause or bool(_links(self.finding, "explains"))

    def explains(self, other: CountedFinding) -> bool:
        """Return whether ``other`` is a consequence of this one: later, and no more serious.

        That is what its rule says, unless the evidence of one of the two knows better.
        """
        rule, known = other.finding.rule, (self.first_step, other.first_step)
        causes = _links(other.finding, "consequence_of")
        return (
            (
                rule.code in (_links(self.finding, "explains") or ())
                or self.finding.rule.code.startswith(rule.consequence_of if causes is None else causes)
            )
            and self.finding.rule.code != rule.code
            and self.finding.severity.rank <= other.finding.severity.rank
            and (None in known or self.first_step <= other.first_step)  # type: ignore[operator]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        finding = self.finding
        return {
            "code": finding.rule.code,
            "name": finding.rule.name,
            "severity": str(finding.severity),
            "place": finding.place.as_dict(),
            "message": finding.message,
            "count": self.count,
            "fix": finding.fix,
            "evidence": dict(finding.evidence),
            "first_step": self.first_step,
            "last_step": self.last_step,
            "ranks": list(self.ranks),
            "excerpt": self.excerpt,
            "diff": self.diff,
            "diff_is_safe": self.diff_is_safe,
            "consequences": [one.as_dict() for one in self.consequences],
        }


def _links(finding: Finding, kind: str) -> tuple[str, ...] | None:
    """Return the codes that a finding's evidence connects it with; None if it says nothing."""
    links = finding.evidence.get("links")
    codes = links.get(kind) if isinstance(links, dict) else None
    return tuple(map(str, codes)) if isinstance(codes, list | tuple) else None


def fold_consequences(found: Sequence[CountedFinding]) -> list[CountedFinding]:
    """Return the findings that no other one explains, in the same order, each with its consequences.

    A consequence of a consequence belongs to the first cause. ``found`` is sorted, the likeliest causes first.
    """
    causes = {}
    shown = any(_links(one.finding, "explains") for one in found)
    for one in found:
        if shown or one.finding.rule.consequence_of:
            causes[id(one)] = next((each for each in found if each.explains(one)), one)
    folded: dict[int, list[CountedFinding]] = {}
    for one in sorted(found, key=lambda one: one.first_step or 0):
        root = one
        for _ in range(LONGEST_CHAIN):  # not forever: rules of plugins may name each other
            root = causes.get(id(root), root)
        folded.setdefault(id(root), []).extend([] if root is one else [one])
    return [replace(one, consequences=folded[id(one)]) for one in found if id(one) in folded]
