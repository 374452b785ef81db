from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP644",
    name="target-out-of-reach",
    severity=Severity.WARNING,
    summary="Many targets lie outside of what the last activation can give.",
    why=(
        "A sigmoid gives numbers between 0 and 1, tanh between -1 and 1, ReLU none below 0. For images that are "
        "normalised to [-1, 1], or prices in thousands, such an output stops at its limit, where its gradient "
        "vanishes, and the loss cannot fall. `binary_cross_entropy_with_logits` takes targets between 0 and 1; with "
        "others, such as labels of -1 and 1, it falls below every bound."
    ),
    fix="Scale the targets to the range of the output, or leave the last activation out.",
    bad="loss = F.mse_loss(decoder(z).sigmoid(), images * 2 - 1)",
    good="loss = F.mse_loss(decoder(z).tanh(), images * 2 - 1)",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.unreachable.items():
        if calls.times >= TIMES:
            yield RULE.at((calls.at or site).place.but(step=calls.step), calls.what, evidence={"times": calls.times})
