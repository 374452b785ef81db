"""Checkpoints without the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.run_events import RunEvents
from ampwise.rules.source.scaler_not_checkpointed import RULE

__all__ = ["RULE", "check"]


def check(run: RunEvents) -> Iterator[Finding]:
    stepped = [made for made in run.scalers if made.enabled]
    if not stepped or any(save.scaler for save in run.saves):
        return
    for save, times in run.saves.items():
        yield RULE.at(
            save.site.place,
            "the optimizer's state is saved, but the GradScaler's is saved nowhere in this run",
            evidence={"times": times},
        )
