from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP623",
    name="loss-without-graph",
    severity=Severity.ERROR,
    summary="`backward` is called on a tensor that was not computed from anything.",
    why=(
        "A tensor made by `torch.tensor(loss.item(), requires_grad=True)`, or detached and then set to require "
        "gradients, is a leaf: its backward pass ends at once, and no parameter gets a gradient. The attribute "
        "silences the error that would have told so."
    ),
    fix="Call `backward` on the loss as it was computed, without `detach`, `.item()`, `.data` or a new tensor.",
    bad="loss = torch.tensor(loss.item(), requires_grad=True)\nloss.backward()",
    good="loss = criterion(model(x), y)\nloss.backward()",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.leaf_losses.items():
        if calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                "the loss is a leaf: it requires gradients, and was not computed from any parameter; its backward "
                "pass gives none of them a gradient",
                evidence={"times": calls.times},
            )
