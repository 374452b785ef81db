"""Proposal: train a model whose state alone exceeds the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.memory import BYTES_A_PARAMETER, gib_text, memory_command, state_bytes

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP710",
    name="state-does-not-fit",
    severity=Severity.WARNING,
    summary="Weights, gradients and Adam's state alone exceed the device's memory, in any precision.",
    why=(
        "Training with Adam keeps 16 bytes per parameter: the FP32 weight, its gradient and two moments. Autocast "
        "changes none of them. A model whose state does not fit needs several devices, less state per parameter, or "
        "fewer trainable parameters, whatever precision its matmuls run in."
    ),
    fix="Shard the state over several devices (FSDP), use an 8-bit optimizer, or train fewer parameters (LoRA).",
    bad='engine = ampwise.Engine(model_of_7b, optimizer, "bf16")  # on one 40 GB GPU',
    good="$ ampwise memory --params 7B --fsdp 8",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    memory, state = choice.target.memory, state_bytes(choice)
    if memory is None or state is None or memory.approximate or state <= memory.value:
        return
    least = -(-state // int(memory.value))
    yield caution(
        RULE,
        choice,
        f"{gib_text(state)} of weights, gradients and Adam's moments ({BYTES_A_PARAMETER} bytes per "
        f"parameter) do not fit "
        f"into the {gib_text(memory.value)} of {choice.target.name}, in any precision and before any activation",
        costs={
            f"FSDP over {least + 1} or more devices": "communication between them",
            "an 8-bit optimizer": "10 bytes per parameter instead of 16",
            "LoRA": "a different model: only a few parameters are trained",
        },
        know=SuggestedCommand(memory_command(choice), "what fits, with which batch, sharding and checkpointing"),
    )
