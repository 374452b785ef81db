from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP116",
    name="steps-in-one-autocast",
    severity=Severity.ERROR,
    summary="Several steps are made within one autocast region, which keeps the casts of the old weights.",
    why=(
        "Within a region autocast casts each FP32 weight once, and keeps the 16-bit copy until the outermost region "
        "ends. A step changes the weight and not the copy: all later passes of the region run with the weights that "
        "the region began with, and the model hardly learns."
    ),
    fix="Enter autocast anew for the forward pass of each step, and leave it before `backward` and `step`.",
    bad='with torch.autocast("cuda"):\n    for x, y in loader:\n        train_step(x, y)',
    good=(
        'for x, y in loader:\n    with torch.autocast("cuda"):\n        loss = criterion(model(x), y)\n    '
        "loss.backward()\n    optimizer.step()"
    ),
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.stale_casts.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                "this region goes on after optimizer steps: the passes after a step use 16-bit copies of the weights "
                "from before it",
                evidence={"times": calls.times},
            )
