"""A function that does not do the same twice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise.evidence.compared import FLOOR_TIMES
from ampwise.evidence.difference import Differing
from ampwise.evidence.difference_words import error_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP534",
    name="not-repeatable",
    severity=Severity.WARNING,
    summary="Two runs of one side differ, by as much as the two sides do.",
    why=(
        "Weights, batch and random numbers are the same in each run. What differs then is another batch (the function "
        "takes the next item of something), random numbers that no generator was asked for, a clock, or sums whose "
        "order is left to chance (atomic additions on a GPU; those differ by a few roundings). Differences between the "
        "sides that are no larger than that say nothing about the precision."
    ),
    fix=(
        "Take what changes out of the function, and give it as an argument; for sums in a fixed order, "
        "`torch.use_deterministic_algorithms(True)`."
    ),
    bad="ampwise.diff(lambda: loss_fn(*next(batches)))",
    good="ampwise.diff(loss_fn, *next(batches))",
)


def check(differing: Differing) -> Iterator[Finding]:
    floor = differing.floor
    if not floor or not _matters(differing):
        return
    how = "other shapes" if math.isinf(floor) else f"{error_text(floor)} off"
    source = ""
    if differing.draws_from:
        named = ", ".join(f"`{name}`" for name in differing.draws_from)
        source = f"; it takes the next items of {named}, which are others each time"
    yield RULE.at(
        Place(module=differing.floor_at),
        f"two runs of a ({differing.a.label}) differ: `{differing.floor_at}` is {how} the second time{source}",
        evidence={"noise_floor": floor if math.isfinite(floor) else None},
    )


def _matters(differing: Differing) -> bool:
    """Whether there is a place at which the noise is as large as what is looked for, or no rounding explains it."""
    found = [each for row in differing.rows for each in row.outputs]
    found += [*differing.returned, *(row.compared for row in differing.parameters)]
    return differing.unsteady or any(each.floor and each.error <= FLOOR_TIMES * each.floor for each in found)
