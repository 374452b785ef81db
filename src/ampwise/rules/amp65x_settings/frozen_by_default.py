from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP651",
    name="frozen-by-default",
    severity=Severity.WARNING,
    summary="An optimizer has a parameter that is frozen by a default.",
    why=(
        "`nn.Embedding.from_pretrained(weights)` has `freeze=True` by default, and a tensor made by `torch.zeros` "
        "needs no gradient: the optimizer accepts both, and passes over them in every step. They keep their values."
    ),
    fix="Pass `freeze=False`, or call `requires_grad_()`; to keep it fixed, say `freeze=True`.",
    bad="embedding = nn.Embedding.from_pretrained(vectors)\noptimizer = SGD(embedding.parameters(), lr=0.1)",
    good=(
        "embedding = nn.Embedding.from_pretrained(vectors, freeze=False)\n"
        "optimizer = SGD(embedding.parameters(), lr=0.1)"
    ),
)

STEPS = 5  # followed ones, at least


def check_learning(facts: Learning) -> Findings:
    for (site, name), held in facts.held_frozen.items():
        if facts.ended and held.last - held.first >= STEPS:
            yield RULE.at(
                site.place.but(parameter=name),
                f"{held.optimizer} has `{name}`, which got no gradient in any step: {held.why}",
            )
