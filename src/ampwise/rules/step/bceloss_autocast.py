"""A loss that raises an error under autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ScriptFailed
from ampwise.rules.source.bceloss_autocast import RULE

__all__ = ["RULE", "check"]


def check(death: ScriptFailed) -> Iterator[Finding]:
    if "unsafe to autocast" in death.message:
        yield RULE.at(
            death.site.place, "torch raises an error for `binary_cross_entropy` under autocast: the script ended here"
        )
