from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP655",
    name="term-without-gradient",
    severity=Severity.WARNING,
    summary="A term of the loss has no gradient: `torch.tensor` has copied the values of tensors that have one.",
    why=(
        "`torch.tensor(values)` makes a new tensor of numbers. If the values were computed from the parameters, as "
        "log-probabilities or losses of single samples, what leads back to the parameters is lost. The other terms of "
        "the loss have gradients, so there is no error; this one is reported with the loss, and trains nothing."
    ),
    fix="Join the tensors themselves: `torch.stack(values)`, or `torch.cat(values)`.",
    bad="loss = value_loss - (torch.tensor(log_probs) * advantages).sum()",
    good="loss = value_loss - (torch.stack(log_probs) * advantages).sum()",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, passes in facts.cut_terms.items():
        if passes.times >= TIMES:
            yield RULE.at(
                site.place.but(step=passes.step),
                f"`{passes.what}` copies values that were computed from the parameters, and the term of the loss that "
                "is made of them has no gradient",
                evidence={"times": passes.times},
            )
