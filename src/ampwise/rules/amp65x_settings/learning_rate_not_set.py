from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP657",
    name="learning-rate-not-set",
    severity=Severity.WARNING,
    summary="A learning rate is assigned where no optimizer of torch reads it.",
    why=(
        "`optimizer.lr` is no attribute of torch's optimizers, and `optimizer.defaults` only counts when parameters "
        "are added. Python accepts both assignments. The learning rate of a step is that of each group."
    ),
    fix='Set it in each group: `for group in optimizer.param_groups: group["lr"] = lr`.',
    bad="optimizer.lr = 0.1 * 0.5**epoch",
    good='for group in optimizer.param_groups:\n    group["lr"] = 0.1 * 0.5**epoch',
)


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        if use.lr_set_in is None or use.lr is None:
            continue
        yield RULE.at(
            use.lr_set_at.place,
            f"`{use.lr_set_in}` of {use.name} was set to another value, and its steps go on with lr={use.lr:.3g}",
            evidence={"lr": use.lr},
        )
