from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP645",
    name="view-for-transpose",
    severity=Severity.WARNING,
    summary="A `view` or `reshape` swaps the sizes of axes, and mixes their values.",
    why=(
        "`x.view(b, d, t)` of a tensor of shape (b, t, d) does not transpose it: the values stay in their order, so "
        "each row of the result has parts of several steps and features. The shapes fit what follows, the loss falls "
        "a little, and the structure of the input is lost. The last states of an RNN, (layers, b, d), are not "
        "(b, layers * d) either: such a view joins those of different samples. Heads of attention are split off by "
        "`view(b, t, heads, d).transpose(1, 2)`, and joined the other way round. And scores of shape (b, classes, t) "
        "are not (b * t, classes): `reshape(-1, classes)` takes neighbouring positions for classes."
    ),
    fix="Use `transpose(1, 2)` or `permute`; before a `reshape(-1, channels)`, too.",
    bad="h = embedding(tokens)  # (b, t, d)\nconv(h.view(b, d, t))",
    good="h = embedding(tokens)\nconv(h.transpose(1, 2))",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for calls in facts.scrambled.values():
        if calls.times >= TIMES and calls.at is not None:
            message = f"a tensor is viewed {calls.what}"
            yield RULE.at(calls.at.place.but(step=calls.step), message, evidence={"times": calls.times})
