from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP641",
    name="normalised-twice",
    severity=Severity.WARNING,
    summary="A cross entropy that takes logits gets probabilities.",
    why=(
        "`F.cross_entropy` begins with a softmax, and `binary_cross_entropy_with_logits` with a sigmoid. On "
        "probabilities, which lie between 0 and 1, it can never say that a class is certain: with 10 classes the loss "
        "does not fall below 1.46, and gradients are small where the model is most wrong. `BCELoss` takes the output "
        "of one sigmoid: that of two is between 0.5 and 0.73."
    ),
    fix="Give the loss the output before the softmax or the sigmoid, and apply that in evaluation only.",
    bad="loss = F.cross_entropy(model(x).softmax(-1), y)",
    good="loss = F.cross_entropy(model(x), y)",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.normalised.items():
        if calls.times >= TIMES:
            message = f"the output goes through a {calls.what}, and the loss normalises it once more"
            yield RULE.at((calls.at or site).place.but(step=calls.step), message, evidence={"times": calls.times})
