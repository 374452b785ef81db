"""Proposal: leave out activation checkpointing because of autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.memory import memory_command

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP721",
    name="checkpointing-avoided",
    severity=Severity.INFO,
    summary="Activation checkpointing is left out because autocast is on, though the two work together.",
    why=(
        "torch.utils.checkpoint records whether autocast was on, and in which dtype, and recomputes under the same "
        "setting. It saves what autocast cannot: it drops activations altogether. Only a block that sets autocast "
        "itself, or casts explicitly, may produce another dtype when it is recomputed."
    ),
    fix="Use torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) inside the autocast block.",
    bad="x = block(x)  # checkpointing does not work with autocast",
    good="x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("no-checkpointing"):
        yield advise_against(
            RULE,
            choice,
            "checkpointing works with autocast: the recomputation runs under the autocast setting of the first pass",
            costs={
                "without": "all activations are kept",
                "with": "one more forward pass of the checkpointed part",
            },
            know=SuggestedCommand(f"{memory_command(choice)} --checkpointing", "the memory it saves"),
        )
