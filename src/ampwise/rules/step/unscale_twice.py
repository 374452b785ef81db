"""Gradients that are unscaled twice."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import Unscale
from ampwise.rules.source.unscale_twice import RULE

__all__ = ["RULE", "check"]


def check(unscale: Unscale) -> Iterator[Finding]:
    if unscale.again:
        yield RULE.at(
            unscale.site.place, "`unscale_` is called a second time before `update`: torch raises an error here"
        )
