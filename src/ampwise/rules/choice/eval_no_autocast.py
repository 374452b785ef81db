"""Validation in FP32, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.eval_no_autocast import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("eval-in-fp32"):
        yield careful(
            RULE,
            choice,
            "validation in FP32 is not wrong: it is slower, takes more memory, and measures another model than the one "
            "that will be used in 16 bits",
            costs={
                "without autocast": "time and memory, and an overflow of FP16 that shows only in use",
                "with autocast": "one line around the loop, no GradScaler",
            },
            know=ToKnow("ampwise check train.py --select AMP501", "the loops that evaluate without it"),
        )
