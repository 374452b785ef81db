from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

RULE = Rule(
    code="AMP707",
    name="fp8-gains-little",
    severity=Severity.WARNING,
    summary="FP8 is requested for a model that runs hardly faster in it than in BF16, or slower.",
    why=(
        "FP8 matmuls peak at twice the rate of BF16, but only matmuls get faster: each tensor is measured and cast "
        "first, while weights, gradients and the optimizer stay as they are. On one H200 (compiled, whole steps) FP8 "
        "ran 1.24x to 1.39x as fast as BF16 at width 4096 with per-tensor scales and 1.13x with per-row scales; at "
        "1.3 B parameters and width 2048 it ran 1.11x to 1.27x and 0.95x as fast. Narrower layers gain less or lose; "
        "convolutions are not converted. The 3,958 TFLOP/s quoted for an H100 are with sparsity; the dense peak is "
        "1,979."
    ),
    fix="Train in BF16; try FP8 from about a billion parameters up, compiled, and measure it against compiled BF16.",
    bad='engine = ampwise.Engine(small_model, optimizer, "fp8")',
    good='engine = ampwise.Engine(model, optimizer, ampwise.Fp8("measured"))  # only the layers that gain',
)
SMALLEST = 1_000_000_000  # parameters: the smallest model with a measured speedup had 1.3 B
MEASURED = (
    "measured on one H200, whole steps: 0.95x to 1.27x the speed of BF16 at 1.3 B (width 2048), 1.13x to 1.39x at "
    "width 4096"
)


def check_choice(choice: PrecisionChoice) -> Findings:
    model = choice.model
    option: dict[str, Any] = {
        "costs": {
            "FP8": "torch.compile, sizes in multiples of 16, 3 or 4 significant bits",
            "BF16": "none of these",
        },
        "show": (
            f"ampwise bench {choice.make} --precisions bf16,fp8 --compile",
            "FP8 against BF16, both compiled",
        ),
    }
    asked_about = choice.proposes("fp8-doubles", "fp8-trains-4x")
    if asked_about:
        first = "Measure first: FP8 against compiled BF16, on a device that has both."
        fact = f"2x is the ratio of the peaks (4x counts sparsity), not of whole steps; {MEASURED}"
        yield choice.finding("no", RULE, fact, **option, do=None if choice.half == "bf16" else first)
    if choice.want != "fp8" or not choice.target.has("fp8") or choice.target.kind != "cuda":
        return
    if model.kind in ("cnn", "rnn", "diffusion"):
        fact = f"FP8 training converts linear layers, and {model.title} has few; {MEASURED}"
        yield choice.finding("no", RULE, fact, **option, refuses="fp8")
    elif model.parameters is not None and model.parameters < SMALLEST:
        fact = f"{model.size} parameters are too few for FP8: measuring and casting cost what the matmuls gain"
        yield choice.finding("no", RULE, f"{fact}; {MEASURED}", **option, refuses="fp8")
    elif not asked_about:
        do = "Get BF16 running first, compiled: it is the baseline for FP8." if model.parameters else None
        yield choice.finding("careful", RULE, f"FP8 gains less than its peak suggests; {MEASURED}", **option, do=do)
