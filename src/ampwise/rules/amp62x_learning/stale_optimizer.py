from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp62x_learning.names import listed

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP621",
    name="stale-optimizer",
    severity=Severity.ERROR,
    summary="The optimizer holds parameters that the loss does not depend on.",
    why=(
        "An optimizer keeps references to the parameters it was given. If the model is made anew, copied, or a layer "
        "is replaced afterwards, the loss depends on the new parameters and the optimizer updates the old ones: "
        "nothing learns, and there is no error, as the step passes over parameters without gradients."
    ),
    fix="Make the optimizer after the model is complete: after replacing layers, copying, wrapping or loading.",
    bad="optimizer = SGD(model.parameters(), lr=0.1)\nmodel.fc = nn.Linear(64, 10)",
    good="model.fc = nn.Linear(64, 10)\noptimizer = SGD(model.parameters(), lr=0.1)",
)

SAMPLES = 4
STEPS = 10  # without any gradient, in a row


def check_learning(facts: Learning) -> Findings:
    outside = [each for each in facts.outside if each.passes >= SAMPLES]
    shapes = Counter(shape for each in outside for shape in each.shapes)
    for use in facts.optimizers:
        if use.sampled < SAMPLES or use.closures or not outside or not use.shapes or use.cut_at is not None:
            continue
        gets_none = use.empty_at_last >= STEPS or len(use.ungraded) == use.trainable
        is_replaced = gets_none and (Counter(use.shapes) & shapes).total() == use.trainable
        if not is_replaced and not (use.replaced and use.ungraded):
            continue
        others = [name for each in outside for name in each.names]
        model = next((each.model for each in outside if each.model), "the model")
        held = f"all {use.trainable} parameters" if is_replaced else listed(use.ungraded)
        steps = use.empty_at_last if is_replaced else use.sampled
        yield RULE.at(
            use.made_at.place,
            f"{held} of this {use.name} got no gradient in the last {steps} steps that were looked at, while "
            f"{listed(others)} of {model} got gradients and {'is' if len(others) == 1 else 'are'} in no optimizer: "
            f"{model} was replaced, in whole or in part, after the optimizer was made",
            evidence={"parameters": use.trainable if is_replaced else len(use.ungraded), "others": len(others)},
        )
