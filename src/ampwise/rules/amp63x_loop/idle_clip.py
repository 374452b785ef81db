from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP637",
    name="idle-clip",
    severity=Severity.WARNING,
    summary="Gradients are clipped when there is nothing to clip.",
    why=(
        "Clipping after the step limits gradients that have been used already; before the backward pass there are "
        "none. A generator, such as `params = model.parameters()`, is empty after its first use: from then on the "
        "clip gets no parameters. The update goes on unclipped."
    ),
    fix="Clip between the backward pass and the step, and pass `model.parameters()` or a list.",
    bad="loss.backward()\noptimizer.step()\nclip_grad_norm_(model.parameters(), 1.0)",
    good="loss.backward()\nclip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
)

TIMES = 10
FIRST = 1  # call of a generator that is not empty yet
WHY = {
    "no parameters": "it gets no parameters (a generator that has been used up is empty)",
    "no gradients": "none of the parameters has a gradient at this point",
    "used gradients": "the optimizer has already used these gradients, and no backward pass came since",
}


def check_learning(facts: Learning) -> Findings:
    for site, call in facts.spent.items():
        yield RULE.at(
            site.place,
            f"this loop has nothing to go through: {call.short} passes a generator, which the loop before has used up, "
            "so the gradients stay as they are",
            fix="Begin the function with `parameters = list(parameters)`.",
        )
    for site, calls in facts.idle_clips.items():
        useful = facts.useful_clips[site]
        if calls.times >= TIMES and useful <= FIRST:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"this clip has no effect: {WHY[calls.what]}",
                evidence={"times": calls.times},
            )
