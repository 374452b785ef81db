"""A scheduler that runs ahead of skipped steps, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.sched_step_unconditional import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("scheduler-every-iteration") and choice.want != "bf16":
        yield no(
            RULE,
            choice,
            "a step that the scaler skipped changed no weight, and the schedule would move on all the same: warm-up is "
            "shorter by each skip",
            costs={
                "every iteration": "a few steps of warm-up where skips are few; more where the scale is still falling",
                "only on steps taken": "`if not scaler.skipped` with ampwise.GradScaler; get_scale() before and after "
                "waits for the GPU twice; a schedule by epoch does not care",
            },
            know=ToKnow("ampwise run train.py", "how many steps were skipped, and whether the schedule moved (AMP114)"),
        )
