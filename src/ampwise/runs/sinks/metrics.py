"""Metrics that are sent to sinks: their names, and the rows computed from facts about a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ampwise.finding import Severity
from ampwise.numbers.census.underflow import NO_UNDERFLOW, underflow
from ampwise.runs.events import Level, LoggedEvent
from ampwise.runs.rows import SKIP_RATE_STEPS, CountedFinding, LayerSample, StepRow

__all__ = ["METRICS", "PREFIX", "STEP", "Metric", "MetricRows", "MetricsRow", "SinkEvent", "SkipCounter", "TimedEvent"]

PREFIX = "ampwise/"
STEP = PREFIX + "step"  # the step axis in sinks whose own step counter belongs to the script

SinkEvent = StepRow | LayerSample | LoggedEvent | Sequence[CountedFinding]  # something that happened in a run


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics that became known at the same time. Unknown ones are missing; inf and NaN are included."""

    step: int  # of the optimizer
    time: float  # seconds since 1970
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric."""

    name: str  # after "ampwise/"; for further optimizers, after "ampwise/optimizer1/"
    what: str
    unit: str
    kind: type  # type of the event it is read from
    read: Callable[[Any], float | None]


class SkipRate(float):
    """Fraction of skipped steps among an optimizer's last steps."""


class TimedEvent(NamedTuple):
    """An event of a run, with its time in seconds since 1970. skip_rate: only for a step; computed before the queue,
    which may drop steps."""

    at: float
    event: SinkEvent
    skip_rate: SkipRate | None = None


class SkipCounter:
    """Counts skipped steps among the last steps of each optimizer."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[bool]] = {}

    def rate(self, row: StepRow) -> SkipRate:
        """Add a step and return the skip rate; takes a microsecond."""
        recent = self._recent.setdefault(row.optimizer, deque(maxlen=SKIP_RATE_STEPS))
        recent.append(row.skipped)
        return SkipRate(recent.count(True) / len(recent))


class _Findings(list[Severity]):
    """Severities of all findings so far."""


class _Events(Counter[str]):
    """Number of events so far, by level."""


def _lost_share(sample: LayerSample) -> float | None:
    """Return the share of gradient values lost to FP16 underflow; None without a loss scale, as then FP16 may not be
    in use."""
    if sample.scale is None:
        return None
    every = [underflow(census, sample.scale) for census in sample.layers.values()]
    seen = [each for each in every if each.values]
    return sum(seen, start=NO_UNDERFLOW).lost_share if seen else None


def _count(severity: Severity) -> Callable[[_Findings], float]:
    return lambda findings: float(findings.count(severity))


def _logged(level: Level) -> Callable[[_Events], float]:
    return lambda events: float(events[level])


METRICS = (
    Metric("loss", "loss of the step, unscaled", "as the loss", StepRow, attrgetter("loss")),
    Metric("loss_scale", "loss scale of the step", "factor", StepRow, attrgetter("scale")),
    Metric("grad_norm", "norm of all gradients, unscaled, before clipping", "L2 norm", StepRow, attrgetter("norm")),
    Metric("skipped", "whether the step was skipped", "0 or 1", StepRow, lambda row: float(row.skipped)),
    Metric("lr", "the learning rate of the first parameter group", "factor", StepRow, attrgetter("lr")),
    Metric(
        "skip_rate",
        f"skipped steps among the last {SKIP_RATE_STEPS}",
        "share",
        SkipRate,
        float,
    ),
    Metric(
        "underflow_share",
        "gradient values that FP16 set to zero, at least",
        "share",
        LayerSample,
        _lost_share,
    ),
    Metric("findings/errors", "findings so far that are errors", "count", _Findings, _count(Severity.ERROR)),
    Metric("findings/warnings", "findings so far that are warnings", "count", _Findings, _count(Severity.WARNING)),
    Metric("findings/info", "findings so far that are advice", "count", _Findings, _count(Severity.INFO)),
    Metric("events/errors", "events so far that are errors, such as a lost rank", "count", _Events, _logged("error")),
    Metric(
        "events/warnings", "events so far that are warnings, such as a rollback", "count", _Events, _logged("warning")
    ),
    Metric("events/info", "events so far that need no action", "count", _Events, _logged("info")),
)


class MetricRows:
    """Turns facts into rows of metrics."""

    def __init__(self) -> None:
        self._found: _Findings | None = None
        self._events = _Events()
        self._step = 0  # of the first optimizer

    def row(self, fact: TimedEvent) -> MetricsRow | None:
        """Return the row of a fact; None if nothing has changed."""
        at, event, skip_rate = fact
        if isinstance(event, StepRow):
            self._step = self._step if event.optimizer else event.step
            return _row(at, event.step, event.optimizer, event, skip_rate)
        if isinstance(event, LayerSample):
            return _row(at, event.last, event.optimizer, event)
        if isinstance(event, LoggedEvent):
            self._events[event.level] += 1
            return _row(at, self._step, 0, self._events)
        found = _Findings(seen.finding.severity for seen in event)
        if found == self._found:
            return None
        self._found = found
        return _row(at, self._step, 0, found)


def _row(at: float, step: int, optimizer: int, *facts: Any) -> MetricsRow | None:
    prefix = f"{PREFIX}optimizer{optimizer}/" if optimizer else PREFIX
    metrics = {prefix + name: value for fact in facts for name, value in _read(fact)}
    return MetricsRow(step, at, metrics) if metrics else None


def _read(fact: Any) -> Iterator[tuple[str, float]]:
    for metric in METRICS:
        if type(fact) is metric.kind:
            value = metric.read(fact)
            if value is not None:
                yield metric.name, float(value)
