"""Gradients thrown away before a step could take them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Conduct
from ampwise.finding import Finding
from ampwise.rules.source.accum_zero_grad_each_microbatch import RULE

__all__ = ["RULE", "check"]

FEWEST = 3  # steps; someone who drops the gradients of a bad batch does it less often


def check(run: Conduct) -> Iterator[Finding]:
    for site, steps in run.dropped.items():
        if steps >= FEWEST and 2 * steps >= run.steps:
            yield RULE.at(
                site.place,
                f"`zero_grad` dropped gradients that no step had taken, before {steps} of {run.steps} steps",
                evidence={"times": steps, "steps": run.steps},
            )
