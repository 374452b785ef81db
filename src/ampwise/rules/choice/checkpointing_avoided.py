"""Activation checkpointing that is left out because of autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.evidence.choice.memory import memory_command
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP721",
    name="checkpointing-avoided",
    severity=Severity.INFO,
    summary="Activation checkpointing is left out because autocast is on, though the two go together.",
    why=(
        "torch.utils.checkpoint remembers whether autocast was on and in which type, and computes again under the "
        "same. It saves what autocast cannot: activations that are there at all. Only a block that sets autocast by "
        "itself, or casts by hand, may come out in another type when it is computed again."
    ),
    fix="Use torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) inside the autocast block.",
    bad="x = block(x)  # checkpointing does not go with autocast",
    good="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("no-checkpointing"):
        yield no(
            RULE,
            choice,
            "checkpointing goes with autocast: what is computed again runs under the autocast that was on the first "
            "time",
            costs={
                "without": "all activations are kept",
                "with": "one more forward pass of what is checkpointed",
            },
            know=ToKnow(f"{memory_command(choice)} --checkpointing", "what it saves"),
        )
