from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP620",
    name="unoptimized-parameters",
    severity=Severity.WARNING,
    summary="Parameters get gradients, and no optimizer has them.",
    why=(
        "The backward pass computes their gradients in every step, and nothing uses them: they keep the values of "
        "their initialisation. Nobody clears these gradients either. Usual causes: a module or a loss with parameters "
        "that was forgotten when the optimizer was made, a layer that was added afterwards, a filter by name that "
        "leaves too much out."
    ),
    fix="Give them to the optimizer, or freeze them with `requires_grad_(False)`, which also saves their gradients.",
    bad="criterion = ArcFace(64, 10)  # has a weight\noptimizer = SGD(model.parameters(), lr=0.1)",
    good=(
        "criterion = ArcFace(64, 10)  # has a weight\noptimizer = SGD([*model.parameters(), *criterion.parameters()], "
        "lr=0.1)"
    ),
    consequence_of=("AMP621",),
)

STEPS = 10  # between the first and the last gradient


def check_learning(facts: Learning) -> Findings:
    if not facts.ended:  # a second optimizer may be made for them
        return
    groups = [each for each in facts.outside if not each.fixed and each.last_step - each.first_step >= STEPS]
    trained = [use for use in facts.optimizers if use.steps and use.empty < use.followed]
    if not groups or not trained:
        return
    place = trained[0].made_at.place
    for group in groups:
        names = listed(group.names) if any(group.names) else f"{len(group.names)} of no module"
        model = f" of {group.model}" if group.model else ""
        have = f"; optimizers have the {group.held} others of this model" if group.held else ""
        yield RULE.at(
            place.but(parameter=group.names[0] or None),
            f"{names}{model} got gradients in all {group.samples} backward passes that were looked at (steps "
            f"{group.first_step} to {group.last_step}), did not change, and no optimizer has them{have}",
            evidence={"parameters": len(group.names), "model": group.model, "held": group.held},
        )
