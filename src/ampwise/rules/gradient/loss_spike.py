"""A loss that jumps."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP610",
    name="loss-spike",
    severity=Severity.WARNING,
    summary="The loss jumps far above its usual noise.",
    why=(
        "A spike is a bad batch, a learning rate too high for where the weights are, or the first sign of a run "
        "that will diverge. Judged against the median and spread of the 50 steps before (of the logarithm, where "
        "losses are above zero): one step more than ten spreads up and twice the median, or five steps in a row "
        "more than five spreads up. The first 40 steps are not judged."
    ),
    fix="Look at the batch of that step; clip gradients, lower the learning rate, or go back to an earlier checkpoint.",
    bad="optimizer.step()",
    good="clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
)


def check(health: Health) -> Iterator[Finding]:
    if not health.losses.spikes:
        return
    worst = max(health.losses.spikes, key=lambda spike: spike.spreads)
    length = f" for {worst.length} steps" if worst.length > 1 else ""
    others = f"; {health.losses.count} such jumps in all" if health.losses.count > 1 else ""
    yield RULE.at(
        Place(step=worst.step),
        f"the loss jumped to {worst.loss:.4g}{length} from a usual {worst.usual:.4g}, "
        f"{worst.spreads:.0f} times its ordinary spread{others}",
        evidence={"times": health.losses.count},
    )
