from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP652",
    name="average-without-effect",
    severity=Severity.WARNING,
    summary="An average of the weights is never updated, or never used.",
    why=(
        "An average (EMA, SWA) must be updated in every step or epoch, in place. `e.mul(d).add(p)` and arithmetic with "
        "`=` make new tensors, which are dropped; `e.clone().mul_(d)` changes a copy. What is then evaluated or saved "
        "are the weights of the start, or those of the last step, and no average."
    ),
    fix="Update it in place after each step, `e.lerp_(p, 1 - decay)`, and evaluate and save the average.",
    bad="for e, p in zip(ema.parameters(), model.parameters()):\n    e.mul(decay).add(p, alpha=1 - decay)",
    good="for e, p in zip(ema.parameters(), model.parameters()):\n    e.mul_(decay).add_(p, alpha=1 - decay)",
    consequence_of=("AMP408",),
)

STEPS = 20
SAID = {
    "never updated": "{} is made, and no update of it was seen in {} steps",
    "unchanged": "{} has the values of its beginning after {} steps that trained the model",
    "dropped": "this update of an average makes new values that nothing uses",
    "never used": "{} is updated, and nothing else is done with it: what is evaluated or saved are other weights",
}


def check_learning(facts: Learning) -> Findings:
    for site, average in facts.idle_averages.items() if facts.ended and facts.steps >= STEPS else ():
        name = f"`{average.name}`" if average.name else "the average"
        yield RULE.at(site.place, SAID[average.why].format(name, facts.steps))
