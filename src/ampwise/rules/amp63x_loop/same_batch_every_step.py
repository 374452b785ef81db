from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP636",
    name="same-batch-every-step",
    severity=Severity.WARNING,
    summary="Every step takes the first batch of its DataLoader.",
    why=(
        "`next(iter(loader))` begins a new pass over the data each time. Without shuffling its first batch is always "
        "the same: the model learns a few samples by heart, and never sees the others."
    ),
    fix=(
        "Iterate over the loader: `for x, y in loader:`. To overfit one batch on purpose, draw it once, before the "
        "loop."
    ),
    bad="for step in range(steps):\n    x, y = next(iter(loader))",
    good="for x, y in loader:\n    train_step(x, y)",
)

PASSES = 10
SHARE = 0.5  # of the steps


def check_learning(facts: Learning) -> Findings:
    for loader in facts.loaders:
        others = sum(each.drawn for each in facts.loaders if each is not loader)
        is_first = loader.passes >= PASSES and loader.first_only >= loader.passes - 1 and loader.drawn <= loader.passes
        trains = loader.passes >= SHARE * facts.steps and others < loader.drawn
        if is_first and trains and loader.batches > 1 and loader.in_order:
            yield RULE.at(
                loader.site.place,
                f"the DataLoader was started anew {loader.passes} times, and each time only the first of its "
                f"{loader.batches} batches was taken, which is the same one without shuffling",
                evidence={"times": loader.passes, "batches": loader.batches},
            )
