"""16 bits for a model whose products are too small to gain by them."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import HALVES, Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP708",
    name="model-too-small-to-gain",
    severity=Severity.INFO,
    summary="The model is so small that 16 bits gain little: launches and memory traffic take its time, not products.",
    why=(
        "Matrix units make matrix products faster. In a model of a few million parameters a step is hundreds of "
        "short kernels, and the time goes into starting them, into elementwise work and into the optimizer; casts "
        "add more of them. Batches that are larger, torch.compile or a CUDA graph gain there."
    ),
    fix="Measure before you change anything; try a larger batch, torch.compile, or Engine(graph=True) first.",
    bad='engine = ampwise.Engine(tiny_model, optimizer, "bf16")  # 1.0 times as fast',
    good="$ ampwise compare train:make --precisions fp32,bf16",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.want not in HALVES or not choice.model.small or choice.measured is not None:
        return
    gain = choice.gain(choice.want)
    expected = "little" if gain is None else f"{gain.text} at best"
    yield careful(
        RULE,
        choice,
        f"{choice.model.title} gains {expected} by {choice.want.upper()}: its time goes into launches, not into "
        "products",
        costs={
            choice.want.upper(): "casts"
            + (" and a GradScaler" if choice.want == "fp16" else "")
            + "; may even be slower",
            "FP32": "nothing",
            "a larger batch, torch.compile, a CUDA graph": "what small models gain by",
        },
        know=ToKnow(f"ampwise compare {choice.subject} --precisions fp32,{choice.want}", "below 1.1 stay in FP32"),
    )
