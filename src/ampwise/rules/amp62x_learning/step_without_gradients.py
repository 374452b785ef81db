from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP622",
    name="step-without-gradients",
    severity=Severity.ERROR,
    summary="The optimizer makes steps, and none of its parameters has a gradient.",
    why=(
        "`step()` passes over parameters without a gradient, without an error. They have none because `zero_grad` was "
        "called between the backward pass and the step, because no backward pass was run, because the loss does not "
        "depend on them (`detach`, `.data`, `.item()`, `no_grad`), or because they are frozen."
    ),
    fix=(
        "Call `zero_grad`, `backward` and `step` in this order, and compute the loss from the model's output without "
        "`detach`."
    ),
    bad="loss.backward()\noptimizer.zero_grad()\noptimizer.step()",
    good="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
    consequence_of=(
        "AMP621",
        "AMP623",
    ),
)

STEPS = 10


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        if use.followed < STEPS or use.empty < use.followed or not use.parameters:
            continue
        steps = f"in all {use.followed} steps that were followed"
        if use.cut_at is not None and use.trainable:
            yield RULE.at(
                use.cut_at.place.but(step=1),
                f"this takes what the {use.parameters} parameters of {use.name} have computed out of the graph of the "
                f"loss: none of them had a gradient {steps}",
                fix="Use the value itself. Where a target is to be constant, detach the target.",
                evidence={"times": use.followed},
            )
            continue
        if sum(use.emptied.values()) >= use.followed / 2:
            site, _ = use.emptied.most_common(1)[0]
            yield RULE.at(
                site.place.but(step=1),
                f"`zero_grad` drops the gradients between the backward pass and the step ({use.step_site.short}) "
                f"{steps}: no weight changes",
                fix="Call `zero_grad` before the backward pass or after the step.",
                evidence={"times": use.followed},
            )
            continue
        if not use.trainable:
            why, fix = "all of them are frozen (`requires_grad` is False)", "Unfreeze what is to be trained."
        elif use.backwards:
            why, fix = "the gradients were gone before the step", RULE.fix
        elif facts.leaf_losses:
            why, fix = "the loss has no graph that leads to them", RULE.fix
        else:
            why = "no backward pass has reached them"
            fix = "Look for `detach`, `.data`, `.item()` or `no_grad` between the parameters and the loss."
        yield RULE.at(
            use.step_site.place.but(step=1),
            f"none of the {use.parameters} parameters of {use.name} had a gradient {steps}: {why}",
            fix=fix,
            evidence={"times": use.followed},
        )
