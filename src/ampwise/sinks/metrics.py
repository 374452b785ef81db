"""What sinks are sent: one table of names for all of them, and the rows made by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, attrgetter
from typing import Any, NamedTuple

from ampwise.evidence.underflow import underflow
from ampwise.finding import Severity
from ampwise.record.rows import SKIP_RATE_OVER, LayerSample, Seen, StepRow

__all__ = ["METRICS", "PREFIX", "STEP", "Fact", "Metric", "Metrics", "Row", "Skips", "Told"]

PREFIX = "ampwise/"
STEP = PREFIX + "step"  # the axis, where a sink's own counter of steps is the script's

Told = StepRow | LayerSample | Sequence[Seen]  # what a run becomes known by


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers that became known together. What is not known is not in it; what is inf or NaN is."""

    step: int  # of the optimizer that they are about
    time: float  # seconds since 1970
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that sinks are sent."""

    name: str  # after "ampwise/"; of a further optimizer, after "ampwise/optimizer1/"
    what: str
    unit: str
    kind: type  # of the fact that it is read from
    read: Callable[[Any], float | None]


class SkipRate(float):
    """Over the last steps of an optimizer."""


class Fact(NamedTuple):
    """What became known, and when, in seconds since 1970. skip_rate: with a step, counted where none is left out."""

    at: float
    told: Told
    skip_rate: SkipRate | None = None


class Skips:
    """Of the last steps of each optimizer."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[bool]] = {}

    def rate(self, row: StepRow) -> SkipRate:
        """With this one; costs a microsecond."""
        recent = self._recent.setdefault(row.optimizer, deque(maxlen=SKIP_RATE_OVER))
        recent.append(row.skipped)
        return SkipRate(recent.count(True) / len(recent))


class _Findings(list[Severity]):
    """Of all findings so far."""


def _lost_share(sample: LayerSample) -> float | None:
    """None without a loss scale: then nobody has said that the gradients were computed in FP16."""
    if sample.scale is None:
        return None
    every = [underflow(census, sample.scale) for census in sample.layers.values()]
    seen = [each for each in every if each.values]
    return reduce(add, seen).lost_share if seen else None


def _count(severity: Severity) -> Callable[[_Findings], float]:
    return lambda findings: float(findings.count(severity))


METRICS = (
    Metric("loss", "what the step descends, without the loss scale", "the loss's own", StepRow, attrgetter("loss")),
    Metric("loss_scale", "what the gradients of the step were multiplied by", "factor", StepRow, attrgetter("scale")),
    Metric("grad_norm", "of all gradients, unscaled, before clipping", "L2 norm", StepRow, attrgetter("norm")),
    Metric("skipped", "whether the step was skipped", "0 or 1", StepRow, lambda row: float(row.skipped)),
    Metric("lr", "the learning rate of the first parameter group", "factor", StepRow, attrgetter("lr")),
    Metric(
        "skip_rate",
        f"skipped steps among the last {SKIP_RATE_OVER}",
        "share",
        SkipRate,
        float,
    ),
    Metric("underflow_share", "gradient values that FP16 turned to zero, estimated", "share", LayerSample, _lost_share),
    Metric("findings/errors", "findings so far that are errors", "count", _Findings, _count(Severity.ERROR)),
    Metric("findings/warnings", "findings so far that are warnings", "count", _Findings, _count(Severity.WARNING)),
    Metric("findings/info", "findings so far that are advice", "count", _Findings, _count(Severity.INFO)),
)


class Metrics:
    """Facts in, rows out."""

    def __init__(self) -> None:
        self._found: _Findings | None = None
        self._step = 0  # of the first optimizer

    def row(self, fact: Fact) -> Row | None:
        """None where nothing is known that was not before."""
        at, told, skip_rate = fact
        if isinstance(told, StepRow):
            self._step = self._step if told.optimizer else told.step
            return _row(at, told.step, told.optimizer, told, skip_rate)
        if isinstance(told, LayerSample):
            return _row(at, told.last, told.optimizer, told)
        found = _Findings(seen.finding.severity for seen in told)
        if found == self._found:
            return None
        self._found = found
        return _row(at, self._step, 0, found)


def _row(at: float, step: int, optimizer: int, *facts: Any) -> Row | None:
    prefix = f"{PREFIX}optimizer{optimizer}/" if optimizer else PREFIX
    metrics = {prefix + name: value for fact in facts for name, value in _read(fact)}
    return Row(step, at, metrics) if metrics else None


def _read(fact: Any) -> Iterator[tuple[str, float]]:
    for metric in METRICS:
        if type(fact) is metric.kind:
            value = metric.read(fact)
            if value is not None:
                yield metric.name, float(value)
