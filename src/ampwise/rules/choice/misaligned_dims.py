"""What sizes matrix units like, misjudged."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.misaligned_dims import RULE

__all__ = ["RULE", "check"]

FACT = "16 bytes are what matrix units load at once: 8 elements of FP16 and of BF16 alike, 16 of FP8"
COSTS = {
    "odd sizes": "right results, by slower kernels or padded copies",
    "multiples of 8": "50257 tokens become 50264 or, better, 50304; a few unused rows",
    "multiples of 64": "preferred on an A100; more padding, seldom more speed",
}


def check(choice: Choice) -> Iterator[Finding]:
    know = ToKnow(
        f"ampwise align {choice.subject}{choice.elsewhere}", "which layers are off, as they run, and what each costs"
    )
    if choice.proposes("odd-sizes"):
        yield careful(RULE, choice, f"{FACT}; others run slower, and just as right", costs=COSTS, know=know)
    if choice.proposes("multiples-of-16"):
        yield no(
            RULE,
            choice,
            f"{FACT}; only FP8 products need their 16, for 16-bit types it is a matter of speed",
            costs=COSTS,
            know=know,
        )
