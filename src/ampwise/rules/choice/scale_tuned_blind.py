"""Proposal: tune the loss scale without evidence that it is the cause."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.choice.advice import SuggestedCommand, advise_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP719",
    name="scale-tuned-blind",
    severity=Severity.INFO,
    summary="The GradScaler's settings are changed without evidence that the loss scale is the cause.",
    why=(
        "The scale adapts by itself: it halves when gradients overflow and doubles after 2000 clean steps, without "
        "lower or upper limits. Starting at 1024 instead of 65536 saves at most six skipped steps; 131072 is where "
        "the scale would be 2000 steps later. A NaN from the forward pass is the same at every scale."
    ),
    fix="Record a run: where other settings would help, the report says which, with the numbers.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1024, backoff_factor=0.75)',
    good="$ ampwise run -o RUN train.py\n$ ampwise report RUN",
)


def check(choice: PrecisionChoice) -> Iterator[Finding]:
    if choice.proposes("tune-the-scale"):
        fact = (
            "the scale adapts by itself: starting at 1024 instead of 65536 saves at most six skipped steps, 131072 is "
            "reached after 2000 clean steps anyway, and a NaN from the forward pass is the same at every scale"
        )
        if choice.want == "bf16":
            fact = "BF16 has no loss scale to tune"
        yield advise_against(
            RULE,
            choice,
            fact,
            costs={
                "other settings, by guesswork": "skipped steps or lost gradients, and the cause remains",
                "settings that a run suggests": "one run of a few hundred steps",
            },
            know=SuggestedCommand(
                "ampwise run -o RUN train.py, then ampwise report RUN", "whether other settings would help, and which"
            ),
        )
