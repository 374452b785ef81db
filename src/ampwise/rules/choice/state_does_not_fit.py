"""A model whose state alone is larger than the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.memory import BYTES_A_PARAMETER, gib, memory_command, state_bytes
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP710",
    name="state-does-not-fit",
    severity=Severity.WARNING,
    summary="Weights, gradients and Adam's state alone are larger than the memory of the device, in any precision.",
    why=(
        "Training with Adam keeps 16 bytes a parameter: the FP32 weight, its gradient and two moments. Autocast "
        "changes none of them. A model whose state does not fit needs several devices, fewer bytes of state, or "
        "fewer trained parameters, whatever its products run in."
    ),
    fix="Shard the state over several devices (FSDP), use an 8-bit optimizer, or train fewer parameters (LoRA).",
    bad='engine = ampwise.Engine(model_of_7b, optimizer, "bf16")  # on one GPU of 40 GB',
    good="$ ampwise memory --params 7B --fsdp 8",
)


def check(choice: Choice) -> Iterator[Finding]:
    memory, state = choice.target.memory, state_bytes(choice)
    if memory is None or state is None or memory.approximate or state <= memory.value:
        return
    least = -(-state // int(memory.value))
    yield careful(
        RULE,
        choice,
        f"{gib(state)} of weights, gradients and Adam's moments ({BYTES_A_PARAMETER} bytes a parameter) do not fit "
        f"into the {gib(memory.value)} of {choice.target.name}, in any precision and before any activation",
        costs={
            f"FSDP over {least + 1} or more devices": "traffic between them",
            "an 8-bit optimizer": "10 bytes a parameter instead of 16",
            "LoRA": "another model: few parameters are trained",
        },
        know=ToKnow(memory_command(choice), "what fits, with which batch, sharding and checkpointing"),
    )
