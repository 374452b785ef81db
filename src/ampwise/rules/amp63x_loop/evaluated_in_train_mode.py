from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP631",
    name="evaluated-in-train-mode",
    severity=Severity.WARNING,
    summary="A model is evaluated in training mode.",
    why=(
        "Without `model.eval()` dropout stays on, and batch norm uses the statistics of each batch and updates its "
        "running ones with the data of the evaluation. Judged only if the model has such modules, ran without "
        "gradients on several inputs in a row, and never ran in evaluation mode."
    ),
    fix="Call `model.eval()` before the evaluation, and `model.train()` after it.",
    bad="with torch.no_grad():\n    accuracy = evaluate(model, loader)",
    good="model.eval()\nwith torch.no_grad():\n    accuracy = evaluate(model, loader)\nmodel.train()",
)

PASSES = 3


def check_learning(facts: Learning) -> Findings:
    for modes in facts.models:
        if facts.ended and modes.mistaken >= PASSES and not modes.evaluated and modes.parts and modes.trained:
            yield RULE.at(
                modes.mistaken_site.place.but(step=modes.mistaken_step),
                f"{modes.model} ran without gradients on many inputs in a row, always in training mode, in which "
                f"{' and '.join(modes.parts)} act otherwise than in evaluation",
                evidence={"times": modes.mistaken, "parts": ", ".join(modes.parts)},
            )
