"""A schedule that moves though the step was skipped."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Scheduled
from ampwise.finding import Finding
from ampwise.rules.source.sched_step_unconditional import RULE

__all__ = ["RULE", "check"]


def check(move: Scheduled) -> Iterator[Finding]:
    if move.after_skip and move.per_step:
        yield RULE.at(move.site.place, f"`{move.scheduler}` moves on after a step that the scaler has skipped")
