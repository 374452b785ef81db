from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.learning import Learning

RULE = Rule(
    code="AMP636",
    name="same-batch-every-step",
    severity=Severity.WARNING,
    summary="Every step takes the first batch of its DataLoader, or each batch has samples of one class only.",
    why=(
        "`next(iter(loader))` begins a new pass over the data each time. Without shuffling its first batch is always "
        "the same: the model learns a few samples by heart, and never sees the others. Data that are sorted by their "
        "labels, and not shuffled, give batches of one class each: every step unlearns what those before have learned."
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
BATCHES = 8
PURE = 0.9  # share of the batches with one label


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
    ordered = next((each for each in facts.loaders if each.in_order and each.batches > 1), None)
    if ordered is not None and _are_sorted(facts.labels, ordered.passes):
        yield RULE.at(
            (ordered.made_at or ordered.site).place,
            f"in {sum(each >= 0 for each in facts.labels)} of {len(facts.labels)} batches that were looked at, all "
            "samples have the same label: the data are sorted by their labels, and not shuffled",
            fix="Pass `shuffle=True`.",
            evidence={"batches": len(facts.labels)},
        )


def _are_sorted(labels: list[int], passes: int) -> bool:
    """Whether the batches have one label each, which only goes up within a pass over the data."""
    pure = [each for each in labels if each >= 0]
    falls = sum(after < before for before, after in pairwise(pure))
    return len(pure) >= BATCHES and len(pure) >= PURE * len(labels) and len(set(pure)) > 1 and falls <= passes
