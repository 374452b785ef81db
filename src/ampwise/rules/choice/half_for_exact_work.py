"""Proposal: use 16-bit or TF32 for work that needs FP32 accuracy."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP718",
    name="half-for-exact-work",
    severity=Severity.WARNING,
    summary="16-bit or TF32 is chosen for numbers that must be accurate to many digits, or are complex.",
    why=(
        "BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits. Training a network "
        "tolerates that, a simulation or a solver does not. Autocast leaves complex tensors alone, so there is no "
        "speedup for them."
    ),
    fix="Stay in FP32 with TF32 off for matmuls and convolutions, or use FP64.",
    bad='with torch.autocast("cuda"):\n    residual = b - A @ x',
    good="torch.backends.cudnn.allow_tf32 = False  # off for convolutions too\nresidual = b.double() - A.double() @ x",
)
COSTS = {
    "16-bit": "2 or 3 decimal digits",
    "TF32": "3 decimal digits in matmuls",
    "FP32": "7 digits, without the speed of tensor cores",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    know = SuggestedCommand(f"ampwise compare {choice.subject} --precisions fp32,tf32", "how far apart the losses are")
    refuses = choice.want if choice.want not in (None, "fp32") else None
    if choice.proposes("exact-numbers"):
        yield advise_against(
            RULE,
            choice,
            "BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits, which is not exact",
            costs=COSTS,
            know=know,
            refuses=refuses,
        )
    if choice.proposes("complex-numbers"):
        yield advise_against(
            RULE,
            choice,
            "autocast does not convert complex tensors: where they do the work there is no speedup",
            costs=COSTS,
            know=know,
            refuses=refuses,
        )
