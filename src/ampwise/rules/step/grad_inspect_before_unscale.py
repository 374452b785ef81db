"""The norm of scaled gradients, taken for that of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Measured
from ampwise.finding import Finding
from ampwise.rules.source.grad_inspect_before_unscale import RULE

__all__ = ["RULE", "check"]


def check(measured: Measured) -> Iterator[Finding]:
    if measured.scaled:
        yield RULE.at(
            measured.site.place,
            f"`{measured.function}` measures gradients that are still multiplied by the loss scale",
        )
