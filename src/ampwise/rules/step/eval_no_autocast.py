"""Evaluation in a different precision than training."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import ForwardCall, RunEvents
from ampwise.rules.source.eval_no_autocast import RULE

__all__ = ["RULE", "check"]


def check(run: RunEvents) -> Iterator[Finding]:
    for forward, times in run.forwards.items():
        trained = {other.precision for other in run.forwards if other.training and _same(other, forward)}
        halves = trained - {"fp32", "fp64"}
        if not forward.training and halves and forward.precision not in trained:
            yield _at(forward, min(halves), times)


def _same(trained: ForwardCall, evaluated: ForwardCall) -> bool:
    """Return whether both are the same model; a copy, such as an average of weights, is matched by class."""
    return trained.model == evaluated.model and evaluated.number in (trained.number, None)


def _at(forward: ForwardCall, half: str, times: int) -> Finding:
    return RULE.at(
        forward.site.place,
        f"{forward.model} was trained in {half.upper()}, but is evaluated in {forward.precision.upper()} here",
        evidence={"times": times} | ({"called_from": forward.site.called_from} if forward.site.called_from else {}),
    )
