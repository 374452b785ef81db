"""A backward pass under autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import Backward
from ampwise.rules.source.backward_in_autocast import RULE

__all__ = ["RULE", "check"]


def check(backward: Backward) -> Iterator[Finding]:
    if backward.autocast is not None:
        yield RULE.at(
            backward.site.place, f"`backward` is called inside an autocast region in {backward.autocast.upper()}"
        )
