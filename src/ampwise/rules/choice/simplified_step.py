"""Proposal: use a minimal training loop."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP715",
    name="simplified-step",
    severity=Severity.INFO,
    summary="The basic loop is copied, and accumulation, clipping, skipped steps and ranks are left for later.",
    why=(
        "The basic loop is correct as long as nothing is added. Clipping needs unscale_; accumulation needs a divided "
        "loss and one update per optimizer step; a scheduler must account for skipped steps; a checkpoint must "
        "include the scaler; ranks must agree. Each of these gets added sooner or later, and getting it wrong raises "
        "no error."
    ),
    fix="Use ampwise.Engine, which handles all of them, or paste the complete loop below.",
    bad="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()  # clipping, accumulation: later",
    good="engine = ampwise.Engine(model, optimizer, clip_norm=1.0, accumulate=4, scheduler=scheduler)",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("simple-loop"):
        yield advise_against(
            RULE,
            choice,
            "loops break on clipping, accumulation, schedulers and multiple ranks, each without an error; whatever is "
            "left out gets added later, one piece at a time",
            costs={
                "the short loop": "correct until something is added to it",
                "the complete loop": "a dozen lines",
                "Engine": "three lines, everything included",
            },
            know=SuggestedCommand("ampwise check train.py", "what the loop is missing"),
        )
