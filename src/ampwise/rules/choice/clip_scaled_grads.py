"""A clip of scaled gradients, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.clip_scaled_grads import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("clip-after-backward") and choice.want != "bf16":
        yield no(
            RULE,
            choice,
            "after backward() gradients are still multiplied by the loss scale, 65536 at first: a clip to 1.0 leaves a "
            "true norm of 1/65536, and training stalls without an error",
            costs={
                "clip right away": "updates tens of thousands of times too small",
                "scaler.unscale_(optimizer) first": "one line; scaler.step then does not unscale again",
            },
            know=ToKnow("ampwise check train.py", "every clip that sees scaled gradients; --fix mends it"),
        )
