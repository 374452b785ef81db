"""Proposal: read gradient norms while they are still scaled."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.grad_inspect_before_unscale import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("norms-after-backward") and choice.want != "bf16":
        yield advise_against(
            RULE,
            choice,
            "a norm read right after backward() is the unscaled norm times the loss scale, initially 65536, and jumps "
            "whenever the scale changes",
            costs={
                "reading it there": "meaningless numbers, and alarms whenever the scale changes",
                "scaler.unscale_(optimizer) first": "one line per step",
            },
            know=SuggestedCommand("ampwise run train.py", "unscaled gradients per parameter, without extra code"),
        )
