from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP640",
    name="crossed-loss",
    severity=Severity.WARNING,
    summary="The loss combines values of each sample with those of all others.",
    why=(
        "A model with one output gives the shape (n, 1), and targets often have the shape (n): their difference is "
        "broadcast to (n, n), every prediction against every target. The loss falls, and the model learns the mean of "
        "the targets, whatever the input. `F.mse_loss` warns about it once; a difference written by hand does not. The "
        "same happens to a policy's `log_prob * advantage` and to weights of samples: the mean of all products is the "
        "product of the means, and has no signal. Silent where the script makes pairs on purpose, by `x[:, None]`."
    ),
    fix="Give both the same shape: `values.squeeze(-1)`, or `others.unsqueeze(-1)`.",
    bad="loss = F.mse_loss(model(x), y)  # (n, 1) and (n)",
    good="loss = F.mse_loss(model(x).squeeze(-1), y)",
)

TIMES = 3  # one batch of another shape may be a test


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.crossed.items():
        if calls.times >= TIMES:
            message = f"{calls.what}: the loss is the mean over all pairs"
            yield RULE.at((calls.at or site).place.but(step=calls.step), message, evidence={"times": calls.times})
