"""A gradient norm that is computed while gradients are scaled."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import GradNormRead
from ampwise.rules.source.grad_inspect_before_unscale import RULE

__all__ = ["RULE", "check"]


def check(measured: GradNormRead) -> Iterator[Finding]:
    if measured.scaled:
        yield RULE.at(
            measured.site.place,
            f"`{measured.function}` measures gradients that are still multiplied by the loss scale",
        )
