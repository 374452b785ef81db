from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.rules.amp6xx_gradients.trends import depth_change

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP606",
    name="exploding-gradients",
    severity=Severity.WARNING,
    summary="Gradients grow by orders of magnitude, across layers or over steps.",
    why=(
        "Each layer that amplifies the gradient makes it larger for the layers before it, until it overflows. And a "
        "norm that grows a thousandfold or more over the steps means that the updates are diverging: inf or NaN "
        "follows, in any precision."
    ),
    fix=(
        "Clip gradients, after `scaler.unscale_` if there is a scaler. Or lower the learning rate, warm it up, or "
        "normalise between layers."
    ),
    bad="optimizer = torch.optim.SGD(model.parameters(), lr=10.0)",
    good=(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nscaler.unscale_(optimizer)\n"
        "clip_grad_norm_(model.parameters(), 1.0)"
    ),
)

RISE = 1e4  # along the depth, and over steps
RISE_BEFORE_THE_END = 1e3  # over steps, if gradients then were not finite
HALF = 4  # steps: each of the last four norms is above each of the four before
BEFORE = 4  # earlier points, needed to know the usual norm


def check_gradients(health: GradientHealth) -> Findings:
    layer, found = depth_change(health)
    if layer is not None and found["ratio"] >= RISE:
        yield RULE.at(
            Place(parameter=layer, step=health.recent[-1].last),
            f"gradients grow by a factor of {found['ratio']:.1e} from the output to the input across "
            f"{found['weights']} weights",
            evidence=found,
        )
    points = health.norms.points
    norms = [norm for _, norm in points]
    before, earlier, latest = norms[: -2 * HALF], norms[-2 * HALF : -HALF], norms[-HALF:]
    if len(before) < BEFORE or median(before) <= 0 or min(latest) <= max(earlier):
        return
    times, last = latest[-1] / median(before), points[-1][0]
    ended = [streak for streak in health.real_streaks() if streak.last >= last]
    if times < (RISE_BEFORE_THE_END if ended else RISE):
        return
    then = f", and gradients were not finite at step {ended[0].first}" if ended else ""
    yield RULE.at(
        Place(step=last),
        f"the gradient norm has grown to {latest[-1]:.3g}, {times:.1e} times its usual value{then}",
        evidence={"usual": median(before)},
    )
