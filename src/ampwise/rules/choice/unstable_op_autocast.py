"""A loss of one's own with exp and log under autocast, proposed."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, careful, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding
from ampwise.rules.source.unstable_op_autocast import RULE

__all__ = ["RULE", "check"]

KEEP = 'Put @ampwise.keep("fp32") on the loss function: it casts what comes in, and autocast is off inside.'
COSTS = {
    "as it is": "inf from exp, then NaN, on the first batch with a large score",
    "all of the loss in FP32": "little: a loss is a small part of a step",
    "only the exp in FP32": "more lines, and the next operation that overflows is missed",
    "cross_entropy, log_softmax, logsumexp": "nothing: they subtract the maximum themselves",
}


def check(choice: Choice) -> Iterator[Finding]:
    know = ToKnow(
        "ampwise check train.py", "the expressions that overflow or cancel (AMP401), each with the function to use"
    )
    if choice.proposes("exp-in-loss"):
        yield careful(RULE, choice, _fact(choice), costs=COSTS, know=know, do=KEEP)
    if choice.proposes("rewrite-loss"):
        yield no(
            RULE,
            choice,
            "a loss need not be written anew: one line keeps the function in FP32, and only what overflows there too "
            "is wrong by itself",
            costs={"writing it anew": "an afternoon, and new mistakes", **COSTS},
            know=know,
            do=KEEP,
        )


def _fact(choice: Choice) -> str:
    if choice.target.kind == "cpu":
        return (
            "autocast on a CPU leaves exp, log, sum and softmax in 16 bits: exp is inf from 11.09 on in FP16 and "
            "from 88.7 on in BF16 and FP32, and log of what rounded to zero is -inf"
        )
    return (
        "CUDA autocast runs exp, log, sum and softmax in FP32, but sigmoid, sqrt, mean and products in 16 bits; exp "
        "itself is inf from 88.7 on in FP32 and BF16, and from 11.09 on where a tensor is FP16 and autocast off"
    )
