"""Unscaling what is unscaled."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Unscale
from ampwise.finding import Finding
from ampwise.rules.source.unscale_twice import RULE

__all__ = ["RULE", "check"]


def check(unscale: Unscale) -> Iterator[Finding]:
    if unscale.again:
        yield RULE.at(
            unscale.site.place, "`unscale_` is called a second time before `update`: torch raises an error here"
        )
