"""Proposal: mix FP16 and BF16 in one step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.mixed_half_dtypes import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("mix-halves"):
        yield advise_against(
            RULE,
            choice,
            "a step that mixes FP16 and BF16 has the range of FP16 and the precision of BF16, and still needs a "
            "GradScaler",
            costs={
                "both": "a cast at each boundary, overflow at 65504, and 8 significant bits",
                "one of them, and FP32 where needed": "Policy(…).keep('fp32', name) for the module that needs more",
            },
            know=SuggestedCommand("ampwise run train.py", "the input and output formats of each module"),
            do=_do(choice),
        )


def _do(choice: PrecisionChoice) -> str | None:
    if choice.half is not None:
        return f"Use one 16-bit dtype: {choice.half.upper()}{' with a GradScaler' if choice.half == 'fp16' else ''}."
    return "Use neither here." if choice.target.known or choice.stays_wide else None
