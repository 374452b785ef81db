"""16 bits for work that needs the digits of FP32."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP718",
    name="half-for-exact-work",
    severity=Severity.WARNING,
    summary="16 bits, or TF32, are chosen for numbers that have to be right to many digits, or are complex.",
    why=(
        "BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits. Training a network forgives "
        "that, a simulation or a solver does not. Complex tensors autocast leaves alone: it gains nothing there."
    ),
    fix="Stay in FP32, TF32 off for products and convolutions, or FP64.",
    bad='with torch.autocast("cuda"):\n    residual = b - A @ x',
    good="torch.backends.cudnn.allow_tf32 = False  # off for convolutions too\nresidual = b.double() - A.double() @ x",
)
COSTS = {
    "16 bits": "2 or 3 decimal digits",
    "TF32": "3 decimal digits in products",
    "FP32": "7 digits; the speed of matrix units",
}


def check(choice: Choice) -> Iterator[Finding]:
    know = ToKnow(f"ampwise compare {choice.subject} --precisions fp32,tf32", "how far the losses are apart")
    refuses = choice.want if choice.want not in (None, "fp32") else None
    if choice.proposes("exact-numbers"):
        yield no(
            RULE,
            choice,
            "BF16 has 8 significant bits, FP16 and TF32 have 11: two or three decimal digits are not exact work",
            costs=COSTS,
            know=know,
            refuses=refuses,
        )
    if choice.proposes("complex-numbers"):
        yield no(
            RULE,
            choice,
            "autocast leaves complex tensors as they are: there is nothing to gain by it where they do the work",
            costs=COSTS,
            know=know,
            refuses=refuses,
        )
