"""Gradients that are discarded before a step uses them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import RunEvents
from ampwise.rules.source.accum_zero_grad_each_microbatch import RULE

__all__ = ["RULE", "check"]

FEWEST = 3  # steps; dropping the gradients of a bad batch is rarer


def check(run: RunEvents) -> Iterator[Finding]:
    for site, steps in run.dropped.items():
        if steps >= FEWEST and 2 * steps >= run.steps:
            yield RULE.at(
                site.place,
                f"`zero_grad` discarded gradients that no step had used, before {steps} of {run.steps} steps",
                evidence={"times": steps, "steps": run.steps},
            )
