"""A loss that autocast refuses."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Died
from ampwise.finding import Finding
from ampwise.rules.source.bceloss_autocast import RULE

__all__ = ["RULE", "check"]


def check(death: Died) -> Iterator[Finding]:
    if "unsafe to autocast" in death.message:
        yield RULE.at(death.site.place, "torch refuses `binary_cross_entropy` under autocast: the script ended here")
