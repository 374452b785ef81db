"""Gradients that grow from the output of a model to its input, or from step to step until they are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ampwise.evidence.depth import depth
from ampwise.evidence.health import Health
from ampwise.evidence.trend import mann_kendall
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP606",
    name="exploding-gradients",
    severity=Severity.WARNING,
    summary="Gradients grow by orders of magnitude, over the layers or over the steps.",
    why=(
        "Each layer that passes on more than it gets makes the gradient of those before it larger, until it overflows. "
        "And a norm that grows from step to step a thousandfold and more means that updates drive the weights apart: "
        "what comes next is inf or NaN, in any precision."
    ),
    fix=(
        "Clip gradients (after `scaler.unscale_`, where there is a scaler), lower the learning rate or warm it up, "
        "normalise between layers."
    ),
    bad="optimizer = torch.optim.SGD(model.parameters(), lr=10.0)",
    good=(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nscaler.unscale_(optimizer)\n"
        "clip_grad_norm_(model.parameters(), 1.0)"
    ),
)

RISE = 1e4  # along the depth, and over steps
RISE_BEFORE_THE_END = 1e3  # over steps, where what came then was not finite
RISING = 8  # of the last steps
SURE = 2.0  # standard deviations of Mann and Kendall's statistic, for eight steps nearly all of which rise
BEFORE = 4  # points of the run, to know what was usual


def check(health: Health) -> Iterator[Finding]:
    yield from _over_depth(health)
    yield from _over_steps(health)


def _over_depth(health: Health) -> Iterator[Finding]:
    found = depth(health)
    if found is None or found.steady < 0 or found.ratio < RISE:
        return
    yield RULE.at(
        Place(parameter=found.first_layer, step=health.recent[-1].last),
        f"gradients grow {found.ratio:.1e} times from the output to the input over {found.layers} weights",
        evidence={"first_rms": found.first, "last_rms": found.last, "ratio": found.ratio, "weights": found.layers},
    )


def _over_steps(health: Health) -> Iterator[Finding]:
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
    then = f", and were not finite at step {ended[0].first}" if ended else ""
    yield RULE.at(
        Place(step=latest[-1].last),
        f"the norm of the gradients has grown to {latest[-1].high:.3g}, {times:.1e} times what was usual{then}",
        evidence={"usual": usual},
    )
