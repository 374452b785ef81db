from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP630",
    name="trained-in-eval-mode",
    severity=Severity.WARNING,
    summary="Steps are made on passes in evaluation mode.",
    why=(
        "After `model.eval()` dropout is off and batch norm uses its running statistics, and does not update them, "
        "until `model.train()` is called. Usually an evaluation at the end of an epoch leaves the model in this mode. "
        "The loss falls, and the model overfits."
    ),
    fix="Call `model.train()` at the start of each epoch, or at the end of the evaluation.",
    bad=("model.train()\nfor epoch in range(10):\n    train(model)\n    evaluate(model)  # calls model.eval()"),
    good=("for epoch in range(10):\n    model.train()\n    train(model)\n    evaluate(model)  # calls model.eval()"),
)

STEPS = 10


def check_learning(facts: Learning) -> Findings:
    for modes in facts.models:
        if modes.in_eval < STEPS or not modes.parts or modes.eval_site is None or modes.eval_site.file is None:
            continue
        before = f"after {modes.trained} in training mode, " if modes.trained else ""
        yield RULE.at(
            modes.eval_site.place.but(step=modes.first_in_eval),
            f"{before}{modes.in_eval} steps in a row were made on passes of {modes.model} in evaluation mode, from "
            f"step {modes.first_in_eval} on: {' and '.join(modes.parts)} do not act as in training; `train()` is not "
            "called after this `eval()`",
            evidence={"times": modes.in_eval, "parts": ", ".join(modes.parts)},
        )
