"""A loss scale that goes up and down all the time."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.evidence.scaling import oscillation
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP608",
    name="scale-oscillation",
    severity=Severity.WARNING,
    summary="The loss scale grows, overflows at once and falls, again and again.",
    why=(
        "A scaler that tries a higher scale once in 2000 steps and loses that step works as it should. With a short "
        "`growth_interval`, or a `growth_factor` that takes several skips to undo, a good part of all steps is lost "
        "to trying, and with them their batches."
    ),
    fix="Use a longer `growth_interval`; torch's own is 2000.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=1)',
    good='scaler = torch.amp.GradScaler("cuda", growth_interval=2000)',
)


def check(health: Health) -> Iterator[Finding]:
    found = oscillation(health)
    if found is None:
        return
    interval = "" if health.growth_interval is None else f" with growth_interval={health.growth_interval}"
    yield RULE.at(
        Place(step=health.last_step),
        f"{found.undone} of {found.growths} growths of the loss scale overflowed at once{interval}: "
        f"{found.skipped:.0%} of the last {len(health.window)} steps were skipped",
        evidence={"times": found.undone},
    )
