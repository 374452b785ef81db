from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP629",
    name="broken-weight-tying",
    severity=Severity.WARNING,
    summary="Weights that were tied are two parameters by the time they are trained.",
    why=(
        "Tied weights are one `Parameter` in two modules. A new `Parameter` in one of them ends that without an "
        "error: both are trained, each with half of the gradient. Two parameters in the same memory (`a.weight.data = "
        "b.weight.data`) are not tied either: the optimizer keeps a state for each and updates the memory twice."
    ),
    fix=(
        "Assign the parameter itself, `head.weight = embedding.weight`, after everything that initialises or replaces "
        "weights."
    ),
    bad="head.weight = embedding.weight\nreset_parameters()  # assigns new parameters",
    good="reset_parameters()\nhead.weight = embedding.weight",
)


def check_learning(facts: Learning) -> Findings:
    for tie in facts.same_memory:
        yield RULE.at(
            tie.made_at.place.but(parameter=tie.second),
            f"`{tie.first}` and `{tie.second}` are two parameters in the same memory: each step of {tie.optimizer} "
            "updates it twice, with two gradients and two states",
            evidence={"first": tie.first, "second": tie.second},
        )
    for untied in facts.untied:
        yield RULE.at(
            untied.site.place,
            f"`{untied.first}` and `{untied.second}` were one parameter until this line assigned a new one: now both "
            "are trained, as separate weights",
            evidence={"first": untied.first, "second": untied.second},
        )
