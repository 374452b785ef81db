from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP658",
    name="seed-set-again",
    severity=Severity.WARNING,
    summary="A seed is set again during the training, which then gets the same random numbers each time.",
    why=(
        "`torch.manual_seed` sets the global generator, also where only its return value is wanted, as in "
        "`generator=torch.manual_seed(0)`. Called in each epoch, in an evaluation or in a data set, it gives the "
        "training the same noise, masks and order each time: the model learns them by heart. Judged by the state of "
        "the generator after the steps that follow."
    ),
    fix="Set the seed once, at the start. For an evaluation make a generator: `torch.Generator().manual_seed(0)`.",
    bad="for epoch in range(10):\n    torch.manual_seed(0)\n    train(model)",
    good="torch.manual_seed(0)\nfor epoch in range(10):\n    train(model)",
)

TIMES = 2


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.reseeded.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"the seed is set to {calls.what} again and again, and the training steps after it draw the same "
                "random numbers each time",
                evidence={"times": calls.times},
            )
