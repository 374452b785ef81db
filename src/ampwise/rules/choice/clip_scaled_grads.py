"""Proposal: clip gradients while they are still scaled."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.clip_scaled_grads import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("clip-after-backward") and choice.want != "bf16":
        yield advise_against(
            RULE,
            choice,
            "after backward() gradients are still multiplied by the loss scale, initially 65536: clipping to 1.0 "
            "leaves an unscaled norm of 1/65536, and training stalls without an error",
            costs={
                "clip immediately": "updates tens of thousands of times too small",
                "scaler.unscale_(optimizer) first": "one line; scaler.step then does not unscale again",
            },
            know=SuggestedCommand("ampwise check train.py", "every clip of scaled gradients; --fix repairs them"),
        )
