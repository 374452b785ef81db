"""Proposal: blame a cause, or rule one out, without checking."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP714",
    name="cause-guessed",
    severity=Severity.WARNING,
    summary="A cause is blamed or ruled out before anything was checked.",
    why=(
        "What was tried may have been done wrong: clipping before unscale_, a scaler that never updates, autocast "
        "that is never entered. And a missing speedup is seldom a torch bug: the model is small, sizes are "
        "misaligned, the GPU waits for data, or TF32 was already on. Each of these takes a minute to check."
    ),
    fix="Check the code first, then the run.",
    bad="# we have a GradScaler, so it is not that",
    good="$ ampwise check train.py\n$ ampwise run train.py",
)
COSTS = {"guessing": "days, and the bug stays", "checking": "a second for the source, minutes for the run"}


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("tried-already"):
        yield advise_against(
            RULE,
            choice,
            "having tried it does not mean it was done right: a scaler that never updates, or clipping before "
            "unscale_, fails too",
            costs=COSTS,
            know=SuggestedCommand("ampwise check train.py", "whether it was done right, without running anything"),
        )
    if choice.proposes("torch-bug"):
        yield advise_against(
            RULE,
            choice,
            "a missing speedup is seldom a torch bug: small models, sizes that are not multiples of 8, casts, waiting "
            "for data, or TF32 that was already on",
            costs=COSTS,
            know=SuggestedCommand(f"ampwise compare {choice.subject}", "the speedup, where the time goes, and why"),
        )
    if choice.proposes("just-works"):
        yield advise_against(
            RULE,
            choice,
            "most mixed-precision mistakes raise no error: clipped scaled gradients, lost updates and underflowed "
            "gradients only make training worse",
            costs=COSTS,
            know=SuggestedCommand(
                "ampwise run train.py",
                "skipped steps, lost gradients, loss scale and gradient norms of the run as it is",
            ),
        )
