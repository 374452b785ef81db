"""Evaluation in another precision than training."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Conduct, Forward
from ampwise.finding import Finding
from ampwise.rules.source.eval_no_autocast import RULE

__all__ = ["RULE", "check"]


def check(run: Conduct) -> Iterator[Finding]:
    trained = {(forward.model, forward.precision) for forward in run.forwards if forward.training}
    for forward, times in run.forwards.items():
        halves = {precision for model, precision in trained if model == forward.model and precision != "fp32"}
        if not forward.training and halves and forward.precision not in halves:
            yield _at(forward, min(halves), times)


def _at(forward: Forward, half: str, times: int) -> Finding:
    return RULE.at(
        forward.site.place,
        f"{forward.model} was trained in {half.upper()}, and is evaluated in {forward.precision.upper()} here",
        evidence={"times": times},
    )
