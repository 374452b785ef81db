"""BF16 weights, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.pure_bf16_plain_optimizer import RULE

__all__ = ["RULE", "check"]


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("half-weights") and choice.half == "bf16":
        yield no(
            RULE,
            choice,
            "BF16 weights have 8 significant bits: an update below about 1/512 of a weight is rounded away, and most "
            "are",
            costs={
                "model.bfloat16()": "2 bytes a weight, and training that stands still without an error",
                "autocast over FP32 weights": "4 bytes a weight; the products run as fast",
                "stochastic rounding": "ampwise.Engine(precision='bf16-pure'), or torchao's, make BF16 weights work",
            },
            know=ToKnow("ampwise run train.py", "the share of updates that change no weight (AMP611)"),
        )
