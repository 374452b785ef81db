"""Proposal: use 16-bit precision for a model too small to benefit."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, caution
from ampwise.rules.evidence.choice.choice import HALVES, PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP708",
    name="model-too-small-to-gain",
    severity=Severity.INFO,
    summary="The model is too small to gain from 16-bit: kernel launches and memory traffic take the time, not "
    "matmuls.",
    why=(
        "Tensor cores speed up matmuls. In a model of a few million parameters, a step is hundreds of short kernels, "
        "and the time goes into launching them, elementwise work and the optimizer; casts add more kernels. Larger "
        "batches, torch.compile or a CUDA graph help there."
    ),
    fix="Measure before changing anything; try a larger batch, torch.compile, or Engine(graph=True) first.",
    bad='engine = ampwise.Engine(tiny_model, optimizer, "bf16")  # 1.0x: no speedup',
    good="$ ampwise compare train:make --precisions fp32,bf16",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.want not in HALVES or not choice.model.small or choice.measured is not None:
        return
    gain = choice.gain(choice.want)
    expected = "little" if gain is None else f"{gain.text} at best"
    yield caution(
        RULE,
        choice,
        f"{choice.model.title} gains {expected} from {choice.want.upper()}: its time goes into kernel launches, not "
        "matmuls",
        costs={
            choice.want.upper(): "casts"
            + (" and a GradScaler" if choice.want == "fp16" else "")
            + "; may even be slower",
            "FP32": "nothing",
            "a larger batch, torch.compile, a CUDA graph": "what speeds up small models",
        },
        know=SuggestedCommand(
            f"ampwise compare {choice.subject} --precisions fp32,{choice.want}", "the speedup: below 1.1x stay in FP32"
        ),
    )
