"""A loss scale that is tuned where it is not the cause."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.choice.answers import ToKnow, no
from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP719",
    name="scale-tuned-blind",
    severity=Severity.INFO,
    summary="The GradScaler's settings are changed by hearsay, and nobody has seen that the scale is the cause.",
    why=(
        "The scale finds itself: it halves when gradients overflow and doubles after 2000 clean steps, without a "
        "floor or a ceiling. A start of 1024 instead of 65536 saves at most six skipped steps; one of 131072 is "
        "where the scale would be 2000 steps later. A NaN of the forward pass is the same at every scale."
    ),
    fix="Look at the run: where settings would help, the report says which, with the numbers.",
    bad='scaler = torch.amp.GradScaler("cuda", init_scale=1024, backoff_factor=0.75)',
    good="$ ampwise run -o RUN train.py\n$ ampwise report RUN",
)


def check(choice: Choice) -> Iterator[Finding]:
    if choice.proposes("tune-the-scale"):
        fact = (
            "the scale finds itself: 1024 instead of 65536 saves six skipped steps at most, 131072 comes after 2000 "
            "clean steps anyway, and a NaN of the forward pass is the same at every scale"
        )
        if choice.want == "bf16":
            fact = "BF16 has no loss scale to tune"
        yield no(
            RULE,
            choice,
            fact,
            costs={
                "other settings, by hearsay": "skipped steps or lost gradients, and the cause stays",
                "settings that a run suggests": "one run of a few hundred steps",
            },
            know=ToKnow("ampwise run -o RUN train.py, then ampwise report RUN", "which settings fit, if others do"),
        )
