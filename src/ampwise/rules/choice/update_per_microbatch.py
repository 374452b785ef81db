"""An update of the scale with every micro-batch, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.update_per_microbatch import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("update-every-microbatch") and choice.want != "bf16":
        yield no(
            RULE,
            choice,
            "one scale holds for the whole window of accumulation: update() may change it, and then the sum has "
            "gradients of different scales in it, which no division makes right",
            costs={
                "update() with each micro-batch": "wrong gradients whenever the scale moves, or an AssertionError",
                "once a window": "backward with each micro-batch on loss / n; unscale_, clip, step, update once",
            },
            know=ToKnow("ampwise check train.py", "AMP104 to AMP106: what is called too often in a window"),
        )
