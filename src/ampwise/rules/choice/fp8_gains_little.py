"""FP8 where it gains little, or loses."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.model import count_text
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP707",
    name="fp8-gains-little",
    severity=Severity.WARNING,
    summary="FP8 is wanted for a model that it hardly makes faster than BF16, or not at all.",
    why=(
        "FP8 products peak at twice the rate of BF16, and only products gain: each tensor is measured and cast "
        "first, weights, gradients and the optimizer stay as they are. On one H200 (compiled, whole "
        "steps) it made 1.24 to 1.33 of BF16's speed at a width of 4096 with a scale a tensor, 1.13 with a scale a "
        "row; at 1.3 B parameters and a width of 2048 it made 1.11 to 1.16 and 0.95. "
        "Narrower layers gain less or lose, convolutions are not converted. The 3,958 "
        "TFLOP/s of an H100 are with sparsity; dense it is 1,979."
    ),
    fix="Train in BF16; try FP8 from about a billion parameters on, compiled, and measure it against compiled BF16.",
    bad='engine = ampwise.Engine(small_model, optimizer, "fp8")',
    good='engine = ampwise.Engine(model, optimizer, "fp8", fp8="measured")  # only the layers that gain',
)
SMALLEST = 1_000_000_000  # parameters: the smallest model it was seen to gain on had 1.3 B
MEASURED = (
    "measured on one H200, whole steps: 0.95 to 1.16 of BF16's speed at 1.3 B (width 2048), 1.13 to 1.33 at width 4096"
)
FIRST = "Measure it before you believe it: FP8 against compiled BF16, on a device that has both."
NOT_LINEAR = ("cnn", "rnn", "diffusion")


def check(choice: Choice) -> Iterator[Finding]:
    know = ToKnow(
        f"ampwise compare {choice.subject} --precisions bf16,fp8 --compile", "FP8 against BF16, both compiled"
    )
    costs = {
        "FP8": "torch.compile, sizes in multiples of 16, 3 or 4 significant bits",
        "BF16": "none of that",
    }
    if choice.proposes("fp8-doubles"):
        fact = f"twice is the ratio of the peaks, not of steps; {MEASURED}"
        yield no(RULE, choice, fact, costs=costs, know=know, do=None if choice.half == "bf16" else FIRST)
    if choice.want == "fp8" and choice.target.has("fp8") and choice.target.kind == "cuda":
        small = _too_small(choice)
        if small:
            yield no(RULE, choice, f"{small}; {MEASURED}", costs=costs, know=know, refuses="fp8")
        elif not choice.proposes("fp8-doubles"):
            yield careful(
                RULE, choice, f"FP8 gains less than its peak; {MEASURED}", costs=costs, know=know, do=_do(choice)
            )


def _too_small(choice: Choice) -> str | None:
    model = choice.model
    if model.kind in NOT_LINEAR:
        return f"FP8 training converts linear layers, of which {model.title} has few"
    if model.parameters is not None and model.parameters < SMALLEST:
        count = count_text(model.parameters)
        return f"{count} parameters are too few for FP8: measuring and casting eat what products gain"
    return None


def _do(choice: Choice) -> str:
    return "Have BF16 running first, compiled: FP8 is measured against that." if choice.model.parameters else RULE.fix
