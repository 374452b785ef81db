"""Proposal: keep the weights in BF16."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.pure_bf16_plain_optimizer import RULE

__all__ = ["RULE", "check"]


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("half-weights") and choice.half == "bf16":
        yield advise_against(
            RULE,
            choice,
            "BF16 weights have 8 significant bits: an update below about 1/512 of the weight is rounded away, and "
            "most updates are that small",
            costs={
                "model.bfloat16()": "2 bytes per weight, and training that stalls without an error",
                "autocast over FP32 weights": "4 bytes per weight; the matmuls are just as fast",
                "stochastic rounding": "ampwise.Engine(precision='bf16-pure'), or torchao's, make BF16 weights work",
            },
            know=SuggestedCommand("ampwise run train.py", "the fraction of updates that change no weight (AMP611)"),
        )
