"""One scaler in several threads."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScalerStep
from ampwise.rules.source.shared_scaler import RULE

__all__ = ["RULE", "check"]


def check(step: ScalerStep) -> Iterator[Finding]:
    if step.threads > 1:
        yield RULE.at(
            step.site.place, f"{step.threads} threads use this GradScaler", evidence={"threads": step.threads}
        )
