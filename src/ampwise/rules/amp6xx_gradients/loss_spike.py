from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP610",
    name="loss-spike",
    severity=Severity.WARNING,
    summary="The loss jumps far above its usual noise.",
    why=(
        "The cause is a bad batch, a learning rate too high for the weights, or the onset of divergence. It is judged "
        "against the median of the 50 steps before and their spread, the median absolute deviation from it (of the "
        "logarithm, if losses are positive): one step more than 14 spreads up and twice the median, or five steps in a "
        "row more than 7 spreads up and 1.5 times the median. The first 40 steps do not count, nor do losses of "
        "networks that take turns, as in a GAN: each depends on what the other has learned."
    ),
    fix="Inspect the batch of that step; clip gradients, lower the learning rate, or go back to an earlier checkpoint.",
    bad="optimizer.step()",
    good="clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
)


def check_gradients(health: GradientHealth) -> Findings:
    if not health.losses.spikes or health.has_rivals:
        return
    worst = max(health.losses.spikes, key=lambda spike: spike.spreads)
    length = f" for {worst.length} steps" if worst.length > 1 else ""
    others = f"; {health.losses.count} such jumps in total" if health.losses.count > 1 else ""
    yield RULE.at(
        Place(step=worst.step),
        f"the loss jumped to {worst.loss:.4g}{length} from a usual {worst.usual:.4g}, {worst.spreads:.0f} times its "
        f"usual spread{others}",
        evidence={"times": health.losses.count},
    )
