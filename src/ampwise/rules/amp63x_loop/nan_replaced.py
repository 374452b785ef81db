from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP638",
    name="nan-replaced",
    severity=Severity.WARNING,
    summary="NaN or infinities in the loss or the gradients are replaced by numbers.",
    why=(
        "The step goes on with numbers that mean nothing: a loss of 0 instead of NaN gives no gradient, and a "
        "gradient with its NaN replaced is not that of the loss. The operation that makes the NaN is still there."
    ),
    fix=(
        "Find the operation that makes the NaN (see the other findings, or `ampwise.trace`), and skip such steps "
        "until then."
    ),
    bad="loss = torch.nan_to_num(criterion(model(x), y))",
    good="loss = criterion(model(x), y)",
    consequence_of=("AMP9",),
)


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.nan_replaced.items():
        yield RULE.at(
            site.place.but(step=calls.step),
            f"a {calls.what} that is not finite is replaced by numbers here, first in step {calls.step}",
            evidence={"times": calls.times},
        )
