"""Norms of scaled gradients, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.grad_inspect_before_unscale import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("norms-after-backward") and choice.want != "bf16":
        yield no(
            RULE,
            choice,
            "a norm read right after backward() is the true one times the loss scale, 65536 at first, and jumps "
            "whenever the scale does",
            costs={
                "reading it there": "numbers that mean nothing, and alarms at every change of the scale",
                "scaler.unscale_(optimizer) first": "one line, once a step",
            },
            know=ToKnow("ampwise run train.py", "gradients by parameter, in true units, without a line of code"),
        )
