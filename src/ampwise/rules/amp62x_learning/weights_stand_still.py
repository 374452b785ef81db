from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP625",
    name="weights-stand-still",
    severity=Severity.ERROR,
    summary="Steps with gradients change no weight, or next to nothing.",
    why=(
        "The learning rate is zero, or so small that the update is below half the distance between neighbouring "
        "numbers of the weights' format; or the gradients are clipped to next to nothing. Some weights with a "
        "gradient are compared before and after a part of the steps. Updates too small for BF16 weights are AMP611."
    ),
    fix="Set the learning rate, and the limit of the clipping, to what the model needs.",
    bad="clip_grad_norm_(model.parameters(), 1e-8)\noptimizer.step()",
    good="clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()",
)

COMPARED = 5
STEPS = 20
STILL = 20  # steps in a row
TINY_LIMIT = 1e-3
TINY_CHANGE = 1e-6  # of the weights, in a step


def check_learning(facts: Learning) -> Findings:
    for use in facts.optimizers:
        if use.compared < COMPARED or use.followed < STEPS or use.lr is None:
            continue
        site, limit = facts.clip_limits.get(use.index, (None, None))
        stands = use.unchanged == use.compared
        if (
            site is not None
            and limit is not None
            and limit < TINY_LIMIT
            and (stands or use.largest_change < TINY_CHANGE)
        ):
            yield RULE.at(
                site.place,
                f"gradients are clipped to {limit:.3g}: no step that was compared changed the weights by more than "
                f"{use.largest_change:.1e} of their size",
                fix="Check which setting is passed as the limit; norms of 0.1 to 10 are usual.",
                evidence={"limit": limit, "compared": use.compared},
            )
        elif stands and use.peak_lr == 0:
            idle = next((each for each in facts.schedules if each.optimizer == use.index and not each.moves), None)
            by = "" if idle is None else f"; {idle.name}, which has set it, was never stepped"
            yield RULE.at(
                (use.made_at if idle is None else idle.made_at).place,
                f"the learning rate of {use.name} has been 0 in all {use.followed} steps that were followed: no "
                f"weight changes{by}",
                fix="Set a learning rate; if a scheduler makes it 0, check its function (an integer division?) and its "
                "number of steps.",
                evidence={"compared": use.compared},
            )
        elif facts.ended and use.still >= STILL and not stands:
            yield RULE.at(
                use.made_at.place.but(step=use.still_from),
                f"from step {use.still_from} to the end, none of {use.still} steps that were compared changed any of "
                f"{use.tried} weights that had a gradient; steps before did. The learning rate is {use.lr:.3g}",
                fix="Look for what keeps the step from reaching these parameters: a compiled or captured step, or a "
                "wrapper that skips it.",
                evidence={"compared": use.still, "lr": use.lr},
            )
        elif stands and use.lr > 0 and "bf16" not in use.precisions:
            yield RULE.at(
                use.made_at.place,
                f"{use.compared} steps were compared, and none changed any of {use.tried} weights that had a "
                f"gradient; the learning rate of {use.name} is {use.lr:.3g}",
                evidence={"compared": use.compared, "lr": use.lr},
            )
