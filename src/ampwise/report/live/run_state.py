"""State of a run at a moment, for display."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ampwise.finding.terminal import printable
from ampwise.report.curves import by_optimizer
from ampwise.report.run_facts import optimizer_names
from ampwise.report.verdict import worst_first
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding, NumberStats, StepBucket

RECENT_S = 30.0  # period over which steps per second are computed
QUIET_S = 60.0  # after which the view says that nothing was written

MOST_CODES = 8  # in a line


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run. With several optimizers, the metrics are those of the first, and ``owner`` names it."""

    status: str  # running, killed, or how it ended
    seconds: float | None  # since the start, or the total time
    quiet_s: float | None  # since the last write, if that is long ago and the run has not ended
    line: Sequence[StepBucket]  # steps of the optimizer, in order
    owner: str
    findings: Sequence[CountedFinding]  # worst first
    events: Sequence[LoggedEvent] = ()
    trouble: Sequence[str] = ()  # what could not be read of the record

    @property
    def step(self) -> int:
        return self.line[-1].last if self.line else 0

    @property
    def skipped(self) -> int:
        return sum(bucket.skipped for bucket in self.line)

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return sum(bucket.count for bucket in self.line)

    @property
    def steps_per_s(self) -> float | None:
        """Recent steps per second; None if there are too few steps."""
        if self.status != "running" or not self.line:
            return None
        last = self.line[-1]
        recent = [bucket for bucket in self.line[-5000:] if bucket.ended >= last.ended - RECENT_S]
        took = last.ended - recent[0].ended
        return sum(bucket.count for bucket in recent[1:]) / took if took > 0 else None

    def present(self, metric: str) -> float | None:
        """Return the last known loss, norm or scale, including NaN and infinity."""
        for bucket in reversed(self.line):
            stats: NumberStats = getattr(bucket, metric)
            if stats.finite:
                return stats.mean
            if stats.known:
                return math.nan if stats.nans else math.inf if stats.infs else -math.inf
        return None


def state_of(run: Run, *, written: float | None = None, clock: float | None = None) -> RunState:
    """Return the state of a run. written: time of the last write; clock: current time; in seconds since 1970."""
    now = time.time() if clock is None else clock
    lines = by_optimizer(run.steps)
    optimizer = min(lines, default=0)
    owner = optimizer_names(run).get(optimizer, f"optimizer {optimizer}") if len(lines) > 1 else ""
    line = lines.get(optimizer, [])
    status, seconds = run.status, None
    began, ended = (_moment(run.manifest.get(name)) for name in ("created", "finished"))
    if status.startswith("running") and run.alive is False:
        status, seconds = "killed", line[-1].ended if line else None
    else:
        if status.startswith("running"):
            status, ended = "running", now
        if began is not None and ended is not None:
            seconds = max(0.0, ended - began)
    quiet = now - written if status == "running" and written is not None else 0.0
    return RunState(
        status=status,
        seconds=seconds,
        quiet_s=quiet if quiet >= QUIET_S else None,
        line=line,
        owner=owner,
        findings=worst_first(run.merged_findings()),
        events=run.events,
        trouble=run.trouble,
    )


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def one_line(now: RunState) -> str:
    """Return a line for a log: ``step 1,234  loss 2.314  scale 65536  norm 1.2  skipped 3  findings 2``."""
    numbers = [(metric, now.present(metric)) for metric in ("loss", "scale", "norm")]
    parts = [
        f"step {now.step:,}",
        *[f"{metric} {format_number(value)}" for metric, value in numbers if value is not None],
        f"skipped {now.skipped:,}",
        f"findings {len(now.findings):,}{_codes(now.findings)}",
        *([f"events {len(now.events):,}"] if now.events else []),
        *([f"nothing written for {format_duration(now.quiet_s)}"] if now.quiet_s is not None else []),
        *([now.status] if now.status != "running" else []),
        *([f"trouble: {format_trouble(now.trouble)}"] if now.trouble else []),
    ]
    return "  ".join(parts)


def _codes(findings: Sequence[CountedFinding]) -> str:
    """Return the codes in brackets, worst first: " (AMP101, AMP204)"; of many, the first few."""
    codes = list(dict.fromkeys(printable(one.finding.rule.code) for one in findings))
    more = ", …" if len(codes) > MOST_CODES else ""
    return f" ({', '.join(codes[:MOST_CODES])}{more})" if codes else ""


def format_trouble(trouble: Sequence[str]) -> str:
    """Return the first message in one line, and how many more there are.

    >>> format_trouble(["steps.jsonl is missing.", "findings.json is missing."])
    'steps.jsonl is missing. (and 1 more)'
    """
    more = f" (and {len(trouble) - 1:,} more)" if len(trouble) > 1 else ""
    return f"{' '.join(trouble[0].split())}{more}"


def format_number(value: float) -> str:
    """Format a number with four digits; integers, such as a loss scale, are written in full.

    >>> format_number(65536.0), format_number(2.31415), format_number(float("nan")), format_number(1e-9)
    ('65536', '2.314', 'NaN', '1e-09')
    """
    if math.isnan(value):
        return "NaN"
    if value.is_integer() and abs(value) < 2**24:
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest units.

    >>> format_duration(4.2), format_duration(200), format_duration(7500), format_duration(3 * 86400 + 7200)
    ('4 s', '3 min', '2 h 5 min', '3 d 2 h')
    """
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if not days else f"{days:,} d {hours % 24} h"
