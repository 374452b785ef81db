"""Proposal: rely on autocast to halve the memory."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.memory import memory_command, state_text

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP709",
    name="memory-wont-halve",
    severity=Severity.INFO,
    summary="Autocast is expected to halve training memory; it shrinks only saved activations.",
    why=(
        "Under autocast, weights, gradients and Adam's two moments stay in FP32: 16 bytes per parameter, plus up to 2 "
        "for the casted copies that autocast keeps until the block ends. Only what is saved for the backward pass "
        "shrinks. Modelled: a CNN takes 49% less; GPT-2 124 M with flash attention takes 26% less at batch 16 and 1% "
        "less at batch 1; with eager attention, 3% more."
    ),
    fix="Estimate it, then shrink what is large: activations by checkpointing or a smaller batch; state by "
    "precision='bf16-pure', an 8-bit optimizer or sharding (FSDP).",
    bad="batch_size *= 2  # mixed precision halves the memory",
    good="$ ampwise memory train:make",
)
COSTS = {
    "autocast": "saves 0 to half of the activations, depending on model and batch; adds up to 2 bytes per parameter "
    "for casted copies",
    "activation checkpointing": "saves most activations, for one more forward pass",
    "bf16-pure": "saves 6 of 16 bytes per parameter; every update has BF16 precision, with stochastic rounding",
    "an 8-bit optimizer": "saves 6 of Adam's 8 bytes per parameter",
    "FSDP over n ranks": "divides the state by n, for communication between ranks",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    know = SuggestedCommand(memory_command(choice), "state, activations and casted copies, in every precision")
    state = f"weights, gradients and Adam's moments stay at 16 bytes per parameter under autocast{state_text(choice)}"
    if choice.proposes("halves-memory"):
        yield advise_against(RULE, choice, f"{state}; only saved activations shrink", costs=COSTS, know=know)
    elif choice.symptom == "memory":
        yield caution(RULE, choice, f"{state}; only saved activations shrink", costs=COSTS, know=know)
