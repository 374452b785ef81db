"""Proposal: use FP8 where it gives little or no speedup."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.model import count_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP707",
    name="fp8-gains-little",
    severity=Severity.WARNING,
    summary="FP8 is requested for a model that runs hardly faster in it than in BF16, or slower.",
    why=(
        "FP8 matmuls peak at twice the rate of BF16, but only matmuls get faster: each tensor is measured and cast "
        "first, while weights, gradients and the optimizer stay as they are. On one H200 (compiled, whole steps) FP8 "
        "ran 1.24x to 1.33x as fast as BF16 at width 4096 with per-tensor scales and 1.13x with per-row scales; at "
        "1.3 B parameters and width 2048 it ran 1.11x to 1.16x and 0.95x as fast. Narrower layers gain less or lose; "
        "convolutions are not converted. The 3,958 TFLOP/s quoted for an H100 are with sparsity; the dense peak is "
        "1,979."
    ),
    fix="Train in BF16; try FP8 from about a billion parameters up, compiled, and measure it against compiled BF16.",
    bad='engine = ampwise.Engine(small_model, optimizer, "fp8")',
    good='engine = ampwise.Engine(model, optimizer, "fp8", fp8="measured")  # only the layers that gain',
)
SMALLEST = 1_000_000_000  # parameters: the smallest model with a measured speedup had 1.3 B
MEASURED = (
    "measured on one H200, whole steps: 0.95x to 1.16x the speed of BF16 at 1.3 B (width 2048), 1.13x to 1.33x at "
    "width 4096"
)
FIRST = "Measure first: FP8 against compiled BF16, on a device that has both."
NOT_LINEAR = ("cnn", "rnn", "diffusion")


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    know = SuggestedCommand(
        f"ampwise compare {choice.subject} --precisions bf16,fp8 --compile", "FP8 against BF16, both compiled"
    )
    costs = {
        "FP8": "torch.compile, sizes in multiples of 16, 3 or 4 significant bits",
        "BF16": "none of these",
    }
    if choice.proposes("fp8-doubles"):
        fact = f"2x is the ratio of the peaks, not of whole steps; {MEASURED}"
        yield advise_against(RULE, choice, fact, costs=costs, know=know, do=None if choice.half == "bf16" else FIRST)
    if choice.want == "fp8" and choice.target.has("fp8") and choice.target.kind == "cuda":
        small = _too_small(choice)
        if small:
            yield advise_against(RULE, choice, f"{small}; {MEASURED}", costs=costs, know=know, refuses="fp8")
        elif not choice.proposes("fp8-doubles"):
            yield caution(
                RULE,
                choice,
                f"FP8 gains less than its peak suggests; {MEASURED}",
                costs=costs,
                know=know,
                do=_do(choice),
            )


def _too_small(choice: PrecisionChoice) -> str | None:
    model = choice.model
    if model.kind in NOT_LINEAR:
        return f"FP8 training converts linear layers, and {model.title} has few"
    if model.parameters is not None and model.parameters < SMALLEST:
        count = count_text(model.parameters)
        return f"{count} parameters are too few for FP8: measuring and casting cost what the matmuls gain"
    return None


def _do(choice: PrecisionChoice) -> str:
    return "Get BF16 running first, compiled: it is the baseline for FP8." if choice.model.parameters else RULE.fix
