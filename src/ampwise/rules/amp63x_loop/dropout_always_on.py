from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP632",
    name="dropout-always-on",
    severity=Severity.WARNING,
    summary="Functional dropout drops units in evaluation, too.",
    why=(
        "`torch.nn.functional.dropout(x, p)` has `training=True` by default, and knows nothing of the module's mode: "
        "after `model.eval()` it goes on dropping units, and predictions are random. `scaled_dot_product_attention` "
        "drops by its `dropout_p` whenever that is not 0."
    ),
    fix="Pass `training=self.training`, or use `nn.Dropout`.",
    bad="x = F.dropout(x, 0.5)",
    good="x = F.dropout(x, 0.5, training=self.training)",
)


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.always_dropped.items():
        yield RULE.at(
            site.place,
            f"{calls.what}: it drops units in evaluation mode, too, in which this model drew random numbers",
            fix="Pass `dropout_p=self.dropout if self.training else 0.0`." if "dropout_p" in calls.what else "",
            evidence={"times": calls.times},
        )
