"""Proposal: validate in FP32."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.eval_no_autocast import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("eval-in-fp32"):
        yield caution(
            RULE,
            choice,
            "validating in FP32 is not wrong, but it is slower, takes more memory, and measures a different model "
            "from the 16-bit one that will be deployed",
            costs={
                "without autocast": "time and memory, and an FP16 overflow that appears only in deployment",
                "with autocast": "one line around the loop; no GradScaler",
            },
            know=SuggestedCommand("ampwise check train.py --select AMP501", "the evaluation loops without autocast"),
        )
