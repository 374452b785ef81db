from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP628",
    name="double-update",
    severity=Severity.WARNING,
    summary="Two optimizers update the same parameters with the same gradients.",
    why=(
        "Each of them makes a full step, so that shared parameters move twice for one backward pass, with two states "
        "and perhaps two learning rates. Optimizers that take turns, each after a backward pass of its own, are no "
        "mistake."
    ),
    fix=(
        "Give each parameter to one optimizer, or clear the gradients and run a backward pass before the second step."
    ),
    bad="loss.backward()\nopt_a.step()\nopt_b.step()  # has the encoder, too",
    good="opt_b = SGD(head.parameters(), lr=0.1)\nloss.backward()\nopt_a.step()\nopt_b.step()",
)

TIMES = 10


def check_learning(facts: Learning) -> Findings:
    for shared in facts.shared:
        if shared.times >= TIMES:
            yield RULE.at(
                shared.site.place,
                f"{listed(shared.parameters)} {'is' if len(shared.parameters) == 1 else 'are'} in {shared.first} and "
                f"{shared.second}: this step uses the gradients that the step before ({shared.first_site.in_text}) "
                "has used",
                evidence={"times": shared.times, "parameters": len(shared.parameters)},
            )
