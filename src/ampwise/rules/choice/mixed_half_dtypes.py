"""FP16 beside BF16, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.mixed_half_dtypes import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("mix-halves"):
        yield no(
            RULE,
            choice,
            "a step in both halves has the range of FP16 and the bits of BF16, and still needs a GradScaler",
            costs={
                "both": "casts at each border, overflow at 65504 and 8 significant bits",
                "one of them, and FP32 where it hurts": "Policy(…).keep('fp32', name) for the module that needs more",
            },
            know=ToKnow("ampwise run train.py", "which format each module took and gave"),
            do=_do(choice),
        )


def _do(choice: Choice) -> str | None:
    if choice.half is not None:
        return f"Use one half dtype: {choice.half.upper()}{' with a GradScaler' if choice.half == 'fp16' else ''}."
    return "Use neither of them here." if choice.target.known or choice.stays_wide else None
