from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP639",
    name="mean-over-ignored",
    severity=Severity.WARNING,
    summary="The mean of a loss counts positions that its `ignore_index` leaves out.",
    why=(
        'With `reduction="none"` the loss of an ignored position is 0, and `.mean()` divides by all positions. Loss '
        'and gradients shrink with the share of padding, which differs from batch to batch. `reduction="mean"` '
        "divides by the others only."
    ),
    fix="Use the default `reduction`, or divide the sum by the number of positions that are not ignored.",
    bad='F.cross_entropy(logits, y, ignore_index=-100, reduction="none").mean()',
    good="F.cross_entropy(logits, y, ignore_index=-100)",
)


def check_learning(facts: Learning) -> Findings:
    for site, mean in facts.diluted.items():
        yield RULE.at(
            site.place.but(step=mean.step),
            f"`.mean()` divides by {mean.positions} positions, of which {mean.ignored} are ignored: the loss is "
            f"{mean.positions / max(mean.positions - mean.ignored, 1):.2g} times too small in this step",
            evidence={"times": mean.times, "ignored": mean.ignored, "positions": mean.positions},
        )
