"""Gradients that grow from the output to the input, or from step to step until they are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.gradient_trend import gradient_trend
from ampwise.rules.evidence.trend import mann_kendall

__all__ = ["RULE", "check"]

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
        "Clip gradients (after `scaler.unscale_` if there is a scaler), lower the learning rate or warm it up, or "
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
RISING = 8  # last steps
SURE = 2.0  # standard deviations of Mann and Kendall's statistic, for eight steps nearly all of which rise
BEFORE = 4  # earlier points, needed to know the usual norm


def check(health: GradientHealth) -> Iterator[Finding]:
    yield from _over_depth(health)
    yield from _over_steps(health)


def _over_depth(health: GradientHealth) -> Iterator[Finding]:
    found = gradient_trend(health)
    if found is None or found.steady < 0 or found.ratio < RISE:
        return
    yield RULE.at(
        Place(parameter=found.first_layer, step=health.recent[-1].last),
        f"gradients grow by a factor of {found.ratio:.1e} from the output to the input across {found.layers} weights",
        evidence={"first_rms": found.first, "last_rms": found.last, "ratio": found.ratio, "weights": found.layers},
    )


def _over_steps(health: GradientHealth) -> Iterator[Finding]:
    points = health.norms.points
    latest, before = points[-RISING:], points[:-RISING]
    if len(before) < BEFORE:
        return
    usual = median(point.mean for point in before)
    if usual <= 0 or mann_kendall([point.mean for point in latest]) < SURE:
        return
    times = latest[-1].high / usual
    ended = [streak for streak in health.real_streaks() if streak.last >= latest[-1].last]
    if times < (RISE_BEFORE_THE_END if ended else RISE):
        return
    then = f", and gradients were not finite at step {ended[0].first}" if ended else ""
    yield RULE.at(
        Place(step=latest[-1].last),
        f"the gradient norm has grown to {latest[-1].high:.3g}, {times:.1e} times its usual value{then}",
        evidence={"usual": usual},
    )
