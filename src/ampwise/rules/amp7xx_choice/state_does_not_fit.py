from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.advise.choice import PrecisionChoice

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


def check_choice(choice: PrecisionChoice) -> Findings:
    memory, state = choice.target.memory, choice.model.state_bytes
    if memory is None or state is None or memory.approximate or state <= memory.value:
        return
    yield choice.finding(
        "careful",
        RULE,
        f"{choice.model.state} of weights, gradients and Adam's moments (16 bytes per parameter) do not fit into the "
        f"{choice.target.memory_text} of {choice.target.name}, in any precision and before any activation",
        costs={
            f"FSDP over {-(-state // int(memory.value)) + 1} or more devices": "communication between them",
            "an 8-bit optimizer": "10 bytes per parameter instead of 16",
            "LoRA": "a different model: only a few parameters are trained",
        },
        show=(choice.memory_command, "what fits, with which batch, sharding and checkpointing"),
    )
