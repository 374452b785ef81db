"""A scheduler that advances although the step was skipped."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import SchedulerStep
from ampwise.rules.source.sched_step_unconditional import RULE

__all__ = ["RULE", "check"]


def check(move: SchedulerStep) -> Iterator[Finding]:
    if move.after_skip and move.per_step:
        yield RULE.at(move.site.place, f"`{move.scheduler}` advances after a step that the scaler skipped")
