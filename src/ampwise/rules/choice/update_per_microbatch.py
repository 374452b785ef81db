"""Proposal: call scaler.update() on every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.update_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("update-every-microbatch") and choice.want != "bf16":
        yield advise_against(
            RULE,
            choice,
            "all micro-batches of an accumulation window must use one scale: update() may change it, and the sum then "
            "mixes gradients of different scales, which no division can correct",
            costs={
                "update() with each micro-batch": "wrong gradients whenever the scale changes, or an AssertionError",
                "once per window": "backward on loss / n per micro-batch; unscale_, clip, step, update once",
            },
            know=SuggestedCommand("ampwise check train.py", "AMP104 to AMP106: what is called too often per window"),
        )
