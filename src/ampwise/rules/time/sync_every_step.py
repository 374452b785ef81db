"""Repeated GPU syncs at one line in each step, as they happened."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.time_use import TimeUse
from ampwise.rules.source.sync_every_step import RULE

__all__ = ["RULE", "check"]

# Logging a loss, moving a batch and a scaler's check for inf are a sync or two each.
MANY = 4


def check(use: TimeUse) -> Iterator[Finding]:
    for site, count in use.syncs.items():
        each = count / use.sync_steps if use.sync_steps else 0.0
        if each >= MANY:
            evidence = {"waits": count, "steps": use.sync_steps}
            yield RULE.at(site.place, f"syncs with the GPU {each:.0f} times per step", evidence=evidence)
