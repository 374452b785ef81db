"""Proposal: step the scheduler even when the optimizer step was skipped."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.sched_step_unconditional import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("scheduler-every-iteration") and choice.want != "bf16":
        yield advise_against(
            RULE,
            choice,
            "a skipped step changes no weight, but the schedule moves on: each skip shortens the warm-up",
            costs={
                "every iteration": "a few warm-up steps where skips are rare, more while the scale is still falling",
                "only on steps taken": "`if not scaler.skipped` with ampwise.GradScaler; comparing get_scale() before "
                "and after syncs with the GPU twice; a per-epoch schedule is not affected",
            },
            know=SuggestedCommand(
                "ampwise run train.py", "how many steps were skipped, and whether the schedule moved (AMP114)"
            ),
        )
