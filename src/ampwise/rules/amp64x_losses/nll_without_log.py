from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP642",
    name="nll-without-log",
    severity=Severity.WARNING,
    summary="`nll_loss` gets something else than logarithms of probabilities.",
    why=(
        "`F.nll_loss` only picks the value of the right class and negates it; the logarithm is up to the caller, as "
        "with `F.ctc_loss`. On probabilities the loss lies between -1 and 0, and its gradient vanishes where the model "
        "is most wrong; on raw outputs nothing bounds it, and it falls to minus infinity."
    ),
    fix="Use `F.cross_entropy` on the raw outputs, or `F.log_softmax` before `F.nll_loss`.",
    bad="loss = F.nll_loss(model(x).softmax(-1), y)",
    good="loss = F.nll_loss(model(x).log_softmax(-1), y)",
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.unlogged.items():
        if calls.times >= TIMES:
            message = f"this loss expects logarithms of probabilities, and gets the output of a {calls.what}"
            yield RULE.at((calls.at or site).place.but(step=calls.step), message, evidence={"times": calls.times})
