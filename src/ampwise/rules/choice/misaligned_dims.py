"""Proposal: ignore or overstate the sizes that tensor cores need."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.misaligned_dims import RULE

__all__ = ["RULE", "check"]

FACT = "tensor cores load 16 bytes at a time: 8 elements of FP16 or BF16, 16 of FP8"
COSTS = {
    "odd sizes": "correct results from slower kernels or padded copies",
    "multiples of 8": "50257 tokens become 50264 or, better, 50304; a few unused rows",
    "multiples of 64": "preferred on an A100; more padding, seldom more speed",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    know = SuggestedCommand(
        f"ampwise align {choice.subject}{choice.elsewhere}",
        "which layers are misaligned at run time, and what each costs",
    )
    if choice.proposes("odd-sizes"):
        yield caution(RULE, choice, f"{FACT}; other sizes run slower, with the same results", costs=COSTS, know=know)
    if choice.proposes("multiples-of-16"):
        yield advise_against(
            RULE,
            choice,
            f"{FACT}; only FP8 matmuls require it, for 16-bit types it is only a matter of speed",
            costs=COSTS,
            know=know,
        )
