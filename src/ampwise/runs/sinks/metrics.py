"""Metrics that are sent to sinks: their names, and the rows computed from the events of a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.numbers.census.underflow import NO_UNDERFLOW, underflow
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import SKIP_RATE_STEPS, LayerSample, StepRow
from ampwise.runs.writer import RunEvent

PREFIX = "ampwise/"
STEP = PREFIX + "step"  # the step axis in sinks whose own step counter belongs to the script


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics that became known at the same time. Unknown ones are missing; inf and NaN are included."""

    step: int  # of the optimizer
    time: float  # seconds since 1970
    metrics: Mapping[str, float]


class Metric(NamedTuple):
    """Definition of a metric."""

    name: str  # after "ampwise/"; for further optimizers, after "ampwise/optimizer1/"
    what: str
    unit: str
    section: str  # of a dashboard
    chart: str  # in that section, perhaps with others


METRICS = (
    Metric("loss", "loss of the step, unscaled", "as the loss", "training", "loss"),
    Metric("loss_scale", "loss scale of the step", "factor", "precision", "loss scale"),
    Metric("grad_norm", "norm of all gradients, unscaled, before clipping", "L2 norm", "training", "gradient norm"),
    Metric("skipped", "whether the step was skipped", "0 or 1", "precision", "skipped steps"),
    Metric("lr", "the learning rate of the first parameter group", "factor", "training", "learning rate"),
    Metric("skip_rate", f"skipped steps among the last {SKIP_RATE_STEPS}", "share", "precision", "skipped steps"),
    Metric(
        "underflow_share", "gradient values that FP16 set to zero, at least", "share", "precision", "underflow in FP16"
    ),
    Metric("findings/errors", "findings so far that are errors", "count", "findings", "findings"),
    Metric("findings/warnings", "findings so far that are warnings", "count", "findings", "findings"),
    Metric("findings/info", "findings so far that are advice", "count", "findings", "findings"),
    Metric("events/errors", "events so far that are errors, such as a lost rank", "count", "findings", "events"),
    Metric("events/warnings", "events so far that are warnings, such as a rollback", "count", "findings", "events"),
    Metric("events/info", "events so far that need no action", "count", "findings", "events"),
)
COUNTED = {"errors": "error", "warnings": "warning", "info": "info"}  # names of metrics: severities and levels


def dashboard() -> dict[str, dict[str, list[str]]]:
    """Return the sections of a dashboard, their charts, and the full names of the metrics in each.

    >>> dashboard()["precision"]["skipped steps"]
    ['ampwise/skipped', 'ampwise/skip_rate']
    """
    sections: dict[str, dict[str, list[str]]] = {}
    for metric in METRICS:
        sections.setdefault(metric.section, {}).setdefault(metric.chart, []).append(PREFIX + metric.name)
    return sections


class TimedEvent(NamedTuple):
    """An event of a run, with its time in seconds since 1970. skip_rate: only for a step; computed before the queue,
    which may drop steps."""

    at: float
    event: RunEvent
    skip_rate: float | None = None


class SkipCounter:
    """Counts skipped steps among the last steps of each optimizer."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[bool]] = {}

    def rate(self, row: StepRow) -> float:
        """Add a step and return the skip rate; takes a microsecond."""
        recent = self._recent.setdefault(row.optimizer, deque(maxlen=SKIP_RATE_STEPS))
        recent.append(row.skipped)
        return recent.count(True) / len(recent)


class MetricRows:
    """Turns events into rows of metrics."""

    def __init__(self) -> None:
        self._found: Counter[str] | None = None  # findings by severity
        self._events: Counter[str] = Counter()  # by level
        self._step = 0  # of the first optimizer

    def row(self, fact: TimedEvent) -> MetricsRow | None:
        """Return the row of an event; None if nothing has changed."""
        event, step, optimizer = fact.event, self._step, 0
        values: dict[str, float | None]
        if isinstance(event, StepRow):
            step, optimizer = event.step, event.optimizer
            self._step = self._step if optimizer else step
            values = {
                "loss": event.loss,
                "loss_scale": event.scale,
                "grad_norm": event.norm,
                "skipped": event.skipped,
                "lr": event.lr,
                "skip_rate": fact.skip_rate,
            }
        elif isinstance(event, LayerSample):
            step, optimizer = event.last, event.optimizer
            values = {"underflow_share": _lost_share(event)}
        elif isinstance(event, LoggedEvent):
            self._events[event.level] += 1
            values = {f"events/{name}": self._events[level] for name, level in COUNTED.items()}
        else:
            found = Counter(str(seen.finding.severity) for seen in event)
            if found == self._found:
                return None
            self._found = found
            values = {f"findings/{name}": found[severity] for name, severity in COUNTED.items()}
        prefix = f"{PREFIX}optimizer{optimizer}/" if optimizer else PREFIX
        metrics = {prefix + name: float(value) for name, value in values.items() if value is not None}
        return MetricsRow(step, fact.at, metrics) if metrics else None


def _lost_share(sample: LayerSample) -> float | None:
    """Return the share of gradient values lost to FP16 underflow; None without a loss scale, as then FP16 may not be
    in use."""
    if sample.scale is None:
        return None
    every = [underflow(census, sample.scale) for census in sample.layers.values()]
    seen = [each for each in every if each.values]
    return sum(seen, start=NO_UNDERFLOW).lost_share if seen else None
