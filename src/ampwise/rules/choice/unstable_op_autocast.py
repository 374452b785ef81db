"""Proposal: use exp and log in a custom loss under autocast."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against, caution
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.source.unstable_op_autocast import RULE

__all__ = ["RULE", "check"]

KEEP = 'Put @ampwise.keep("fp32") on the loss function: it casts the inputs and disables autocast inside.'
COSTS = {
    "as it is": "inf from exp, then NaN, on the first batch with a large score",
    "the whole loss in FP32": "little: the loss is a small part of a step",
    "only the exp in FP32": "more lines, and the next operation that overflows is missed",
    "cross_entropy, log_softmax, logsumexp": "nothing: they already subtract the maximum",
}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    know = SuggestedCommand(
        "ampwise check train.py",
        "the expressions that overflow or cancel (AMP401), each with the function to use instead",
    )
    if choice.proposes("exp-in-loss"):
        yield caution(RULE, choice, _fact(choice), costs=COSTS, know=know, do=KEEP)
    if choice.proposes("rewrite-loss"):
        yield advise_against(
            RULE,
            choice,
            "the loss need not be rewritten: one line keeps the function in FP32, and only what overflows in FP32 too "
            "is actually wrong",
            costs={"rewriting it": "an afternoon, and new bugs", **COSTS},
            know=know,
            do=KEEP,
        )


def _fact(choice: PrecisionChoice) -> str:
    if choice.target.kind == "cpu":
        return (
            "CPU autocast leaves exp, log, sum and softmax in 16-bit: exp is inf from 11.09 up in FP16 and from 88.7 "
            "up in BF16 and FP32, and the log of a value that rounded to zero is -inf"
        )
    return (
        "CUDA autocast runs exp, log, sum and softmax in FP32, but sigmoid, sqrt, mean and matmuls in 16-bit; exp is "
        "inf from 88.7 up in FP32 and BF16, and from 11.09 up on FP16 tensors with autocast off"
    )
