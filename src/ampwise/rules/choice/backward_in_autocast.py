"""A backward pass inside autocast, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.backward_in_autocast import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("backward-in-autocast"):
        yield no(
            RULE,
            choice,
            "each operation runs backward in the type it ran in forward: autocast around backward() adds nothing, "
            "but casts for custom functions and hooks that were not written for them",
            costs={
                "inside": "wrong types where there are custom functions or double backward",
                "outside": "an indent less",
            },
            know=ToKnow("ampwise check train.py", "every backward() inside the block (AMP111)"),
        )
