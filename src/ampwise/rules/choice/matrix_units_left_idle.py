"""FP32 where matrix units for 16 bits stand idle."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import HALVES, Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP711",
    name="matrix-units-left-idle",
    severity=Severity.INFO,
    summary="FP32 is wanted on a device whose matrix units run 16 bits many times faster.",
    why=(
        "FP32 products run on ordinary cores, at a fraction of what the matrix units do. Where the numbers allow it, "
        "16 bits are a few lines: autocast, and a GradScaler for FP16. Where they do not, TF32 is one line and keeps "
        "FP32's range."
    ),
    fix="Measure 16 bits and TF32 against FP32 before you leave them out.",
    bad='engine = ampwise.Engine(model, optimizer, "fp32")',
    good='engine = ampwise.Engine(model, optimizer, "auto")',
)


def check(choice: Choice) -> Iterator[Finding]:
    half = choice.target.half
    know = ToKnow(f"ampwise compare {choice.subject}", "every precision that the device runs, as whole steps")
    if choice.proposes("too-complex") and (half is not None or not choice.target.known):
        yield no(
            RULE,
            choice,
            "mixed precision is one `with` block, and in FP16 four lines for the GradScaler; Engine(model, "
            "optimizer) is the whole step",
            costs=_costs(choice, half),
            know=know,
            do="Paste the code below; `ampwise check` reads what you made of it.",
        )
    elif choice.want == "fp32" and half is not None and choice.model.small is False:
        gain = choice.gain(half)
        faster = "" if gain is None else f": {gain.text} {gain.over.upper()} are left (derived)"
        yield careful(
            RULE,
            choice,
            f"FP32 leaves the {half.upper()} matrix units idle{faster}",
            costs=_costs(choice, half),
            know=know,
        )


def _costs(choice: Choice, half: str | None) -> dict[str, str]:
    costs = {"FP32": "the speed of the matrix units"}
    if choice.target.tf32_gains:
        costs["TF32"] = "one line, FP32's range, 10 mantissa bits"
    for fmt in HALVES if half is None else (half,):
        costs[fmt.upper()] = (
            "a `with` block, 8 significant bits" if fmt == "bf16" else "a `with` block and a GradScaler"
        )
    return costs
