from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP653",
    name="average-without-buffers",
    severity=Severity.WARNING,
    summary="An average follows a model's parameters, and keeps the batch norm statistics of the start.",
    why=(
        "`parameters()` has no buffers. The running means and variances of batch norm are buffers: the average keeps "
        "those that it was made with, usually zeros and ones, and in evaluation mode its outputs are wrong, however "
        "good its weights are."
    ),
    fix="Copy the buffers in each update, or call `torch.optim.swa_utils.update_bn(loader, average)` at the end.",
    bad="for e, p in zip(ema.parameters(), model.parameters()):\n    e.lerp_(p, 1 - decay)",
    good=(
        "for e, p in zip(ema.parameters(), model.parameters()):\n    e.lerp_(p, 1 - decay)\n"
        "for e, b in zip(ema.buffers(), model.buffers()):\n    e.copy_(b)"
    ),
)

TIMES = 3


def check_learning(facts: Learning) -> Findings:
    for site, calls in facts.stale_buffers.items():
        if facts.ended and calls.times >= TIMES:
            yield RULE.at(
                site.place.but(step=calls.step),
                f"the parameters of this {calls.what} follow those of the trained one; its running statistics have "
                "not changed, while those of the trained one have",
                evidence={"times": calls.times},
            )
