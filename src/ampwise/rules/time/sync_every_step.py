"""Waits for the GPU at one line, many times in each step, as they happened."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.timing import TimeUse
from ampwise.finding import Finding
from ampwise.rules.source.sync_every_step import RULE

__all__ = ["RULE", "check"]

# A loss that is logged, a batch that is moved and a scaler's look at its gradients are a wait or two each.
MANY = 4


def check(use: TimeUse) -> Iterator[Finding]:
    for site, count in use.syncs.items():
        each = count / use.sync_steps if use.sync_steps else 0.0
        if each >= MANY:
            evidence = {"waits": count, "steps": use.sync_steps}
            yield RULE.at(site.place, f"waits for the GPU {each:.0f} times in a step", evidence=evidence)
