"""What there is to say of a run at a moment."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ampwise.report.curves import by_optimizer, spread_of
from ampwise.report.facts import optimizer_names
from ampwise.report.verdict import worst_first

if TYPE_CHECKING:
    from ampwise.record.bucket import Bucket, Spread
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["Now", "lasting", "number_words", "one_line", "state_of", "trouble_words"]

RECENT_S = 30.0  # over which steps a second are counted
QUIET_S = 60.0  # after which it is said that nothing was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Of several optimizers, the numbers are those of the first, and ``owner`` names it."""

    status: str  # running, killed, or how it ended
    seconds: float | None  # since it began, or that it took
    quiet_s: float | None  # since anything was written, where that is long, and it has not ended
    line: Sequence[Bucket]  # the steps of the optimizer, in their order
    owner: str
    findings: Sequence[Seen]  # worst first
    trouble: Sequence[str] = ()  # what could not be read of the record

    @property
    def step(self) -> int:
        return self.line[-1].last if self.line else 0

    @property
    def skipped(self) -> int:
        return sum(bucket.skipped for bucket in self.line)

    @property
    def steps(self) -> int:
        """That there is a row of."""
        return sum(bucket.count for bucket in self.line)

    @property
    def steps_per_s(self) -> float | None:
        """Lately; None where there were too few."""
        if self.status != "running" or not self.line:
            return None
        last = self.line[-1]
        recent = [bucket for bucket in self.line[-5000:] if bucket.ended >= last.ended - RECENT_S]
        took = last.ended - recent[0].ended
        return sum(bucket.count for bucket in recent[1:]) / took if took > 0 else None

    def present(self, metric: str) -> float | None:
        """The last that is known of loss, norm or scale; NaN and the infinities are."""
        spreads = (spread_of(bucket, metric) for bucket in reversed(self.line))
        return next((_value(spread) for spread in spreads if spread.known), None)


def state_of(run: Run, *, written: float | None = None, clock: float | None = None) -> Now:
    """``written``: when the record was last written to; ``clock``: what time it is, in seconds since 1970."""
    now = time.time() if clock is None else clock
    lines = by_optimizer(run.steps)
    optimizer = min(lines, default=0)
    owner = optimizer_names(run).get(optimizer, f"optimizer {optimizer}") if len(lines) > 1 else ""
    line = lines.get(optimizer, [])
    status = _status(run)
    quiet = now - written if status == "running" and written is not None else 0.0
    return Now(
        status=status,
        seconds=_seconds(run, line, status, now),
        quiet_s=quiet if quiet >= QUIET_S else None,
        line=line,
        owner=owner,
        findings=worst_first(run.merged_findings()),
        trouble=run.trouble,
    )


def one_line(now: Now) -> str:
    """For a log: ``step 1,234  loss 2.314  scale 65536  norm 1.2  skipped 3  findings 2``."""
    numbers = [(metric, now.present(metric)) for metric in ("loss", "scale", "norm")]
    told = [
        f"step {now.step:,}",
        *[f"{metric} {number_words(value)}" for metric, value in numbers if value is not None],
        f"skipped {now.skipped:,}",
        f"findings {len(now.findings):,}",
        *([f"nothing written for {lasting(now.quiet_s)}"] if now.quiet_s is not None else []),
        *([now.status] if now.status != "running" else []),
        *([f"trouble: {trouble_words(now.trouble)}"] if now.trouble else []),
    ]
    return "  ".join(told)


def trouble_words(trouble: Sequence[str]) -> str:
    """The first in a line; the others are counted.

    >>> trouble_words(["steps.jsonl is missing.", "findings.json is missing."])
    'steps.jsonl is missing. (and 1 more)'
    """
    more = f" (and {len(trouble) - 1:,} more)" if len(trouble) > 1 else ""
    return f"{' '.join(trouble[0].split())}{more}"


def number_words(value: float) -> str:
    """A number as one reads it at a glance; a scale is a power of two, and stays whole.

    >>> number_words(65536.0), number_words(2.31415), number_words(float("nan")), number_words(1e-9)
    ('65536', '2.314', 'NaN', '1e-09')
    """
    if math.isnan(value):
        return "NaN"
    if value.is_integer() and abs(value) < 2**24:
        return f"{value:.0f}"
    return f"{value:.4g}"


def lasting(seconds: float) -> str:
    """A stretch of time in its largest units.

    >>> lasting(4.2), lasting(200), lasting(7500), lasting(3 * 86400 + 7200)
    ('4 s', '3 min', '2 h 5 min', '3 d 2 h')
    """
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if not days else f"{days:,} d {hours % 24} h"


def _status(run: Run) -> str:
    """One whose process is gone, or on another machine, has the status "running", too."""
    if run.status.startswith("running"):
        return "killed" if run.alive is False else "running"
    return run.status


def _seconds(run: Run, line: Sequence[Bucket], status: str, now: float) -> float | None:
    began, ended = _moment(run.manifest.get("created")), _moment(run.manifest.get("finished"))
    if status == "killed":
        return line[-1].ended if line else None
    if status == "running":
        ended = now
    return None if began is None or ended is None else max(0.0, ended - began)


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _value(spread: Spread) -> float | None:
    if spread.finite:
        return spread.mean
    return math.nan if spread.nans else math.inf if spread.infs else -math.inf
