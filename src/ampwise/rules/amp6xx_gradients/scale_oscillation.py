from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP608",
    name="scale-oscillation",
    severity=Severity.WARNING,
    summary="The loss scale repeatedly grows, overflows immediately and falls.",
    why=(
        "A scaler that tries a higher scale once in 2000 steps and loses that step works as intended. With a short "
        "`growth_interval`, or a `growth_factor` that takes several skips to undo, many steps are lost to such "
        "attempts, along with their batches."
    ),
    fix="Use a longer `growth_interval`; torch's default is 2000.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=1)',
    good='scaler = torch.amp.GradScaler("cuda", growth_interval=2000)',
)


def check_gradients(health: GradientHealth) -> Findings:
    found = health.oscillation()
    if found is not None:
        interval = "" if health.growth_interval is None else f" with growth_interval={health.growth_interval}"
        yield RULE.at(
            Place(step=health.last_step),
            f"{found.undone} of {found.growths} increases of the loss scale overflowed immediately{interval}: "
            f"{found.skipped:.0%} of the last {len(health.window)} steps were skipped",
            evidence={"times": found.undone},
        )
