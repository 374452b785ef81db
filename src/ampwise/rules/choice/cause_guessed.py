"""A cause that is blamed, or ruled out, without a look."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP714",
    name="cause-guessed",
    severity=Severity.WARNING,
    summary="A cause is blamed or ruled out before anything was looked at.",
    why=(
        "What was tried may have been done wrongly: a clip before unscale_, a scaler that never updates, autocast "
        "that is never entered. And what is slow is seldom a bug of torch: it is a small model, a size that is off, "
        "waiting for data, or TF32 that was on before. Each of these shows in a minute."
    ),
    fix="Have what was done checked first, then look at the run.",
    bad="# we have a GradScaler, so it is not that",
    good="$ ampwise check train.py\n$ ampwise run train.py",
)
COSTS = {"guessing": "days, and the fault stays", "looking": "a second for the source, minutes for the run"}


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("tried-already"):
        yield no(
            RULE,
            choice,
            "tried is not done right: a scaler that never updates, or a clip before unscale_, is tried and fails",
            costs=COSTS,
            know=ToKnow("ampwise check train.py", "whether what was tried was done right; nothing is run"),
        )
    if choice.proposes("torch-bug"):
        yield no(
            RULE,
            choice,
            "little speed-up is seldom a bug of torch: a small model, sizes that are no multiple of 8, casts, "
            "waiting for data, or TF32 that was on already",
            costs=COSTS,
            know=ToKnow(f"ampwise compare {choice.subject}", "the ratio, where the time goes, and the reason"),
        )
    if choice.proposes("just-works"):
        yield no(
            RULE,
            choice,
            "most mistakes with mixed precision raise no error: clipped scaled gradients, lost updates and flushed "
            "gradients only train worse",
            costs=COSTS,
            know=ToKnow("ampwise run train.py", "skipped steps, lost gradients, scale and norms of a run as it is"),
        )
