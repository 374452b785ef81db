"""A loop without what real training needs."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP715",
    name="simplified-step",
    severity=Severity.INFO,
    summary="The basic loop is copied, and accumulation, clipping, skipped steps and ranks are left for later.",
    why=(
        "The basic loop is right as long as nothing is added. Clipping needs unscale_, accumulation needs one update "
        "a window and the loss divided, a scheduler has to know of skipped steps, a checkpoint has to hold the "
        "scaler, and ranks have to agree. Each of these is added sooner or later, and goes wrong without an error."
    ),
    fix="Use ampwise.Engine, which has them all; or paste the loop below whole.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()  # the rest later",
    good="engine = ampwise.Engine(model, optimizer, clip_norm=1.0, accumulate=4, scheduler=scheduler)",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("simple-loop"):
        yield no(
            RULE,
            choice,
            "clipping, accumulation, schedulers and ranks are what loops break on, each without an error; left out, "
            "they come back one at a time",
            costs={
                "the short loop": "right until something is added to it",
                "the whole loop": "a dozen lines",
                "Engine": "three lines, with all of it",
            },
            know=ToKnow("ampwise check train.py", "what a loop lacks"),
        )
