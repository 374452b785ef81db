"""Half the memory, expected of autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.memory import memory_command, state_text
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP709",
    name="memory-wont-halve",
    severity=Severity.INFO,
    summary="Autocast is expected to halve the memory of training; it shrinks saved activations alone.",
    why=(
        "Under autocast weights, gradients and Adam's two moments stay in FP32: 16 bytes a parameter, and up to 2 more "
        "for the copies that autocast casts and keeps until the block ends. Only what is saved for the backward pass "
        "shrinks. Modelled: a CNN takes 49% less; GPT-2 124 M with flash attention 26% less at batch 16 and 1% less at "
        "batch 1; with eager attention 3% more."
    ),
    fix="Count it; then shrink what is large: activations by checkpointing or a smaller batch, state by "
    "precision='bf16-pure', an 8-bit optimizer or sharding (FSDP).",
    bad="batch_size *= 2  # mixed precision halves the memory",
    good="$ ampwise memory train:make",
)
COSTS = {
    "autocast": "0 to half of the activations, by model and batch; up to 2 bytes a parameter more for cast copies",
    "activation checkpointing": "most activations gone, for one more forward pass",
    "bf16-pure": "6 of 16 bytes a parameter, and BF16's bits in every update, rounded by chance",
    "an 8-bit optimizer": "6 of Adam's 8 bytes a parameter",
    "FSDP over n ranks": "state divided by n, for traffic between them",
}


def check(choice: Choice) -> Iterator[Finding]:
    know = ToKnow(memory_command(choice), "state, activations and cast copies, in every precision side by side")
    state = f"weights, gradients and Adam's moments stay at 16 bytes a parameter under autocast{state_text(choice)}"
    if choice.proposes("halves-memory"):
        yield no(RULE, choice, f"{state}; only saved activations shrink", costs=COSTS, know=know)
    elif choice.symptom == "memory":
        yield careful(RULE, choice, f"{state}; only saved activations shrink", costs=COSTS, know=know)
