from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.diff.wording import error_text

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import StepDifference

RULE = Rule(
    code="AMP534",
    name="not-repeatable",
    severity=Severity.WARNING,
    summary="Two runs of the same side differ by as much as the two sides do.",
    why=(
        "Weights, batch and random seeds are the same in each run. What remains is a different batch (the function "
        "takes the next item of an iterator), random numbers from an unseeded source, a clock, or sums in "
        "nondeterministic order (atomic adds on a GPU; those differ by a few roundings). Differences between the "
        "sides that are no larger than that say nothing about precision."
    ),
    fix=(
        "Move whatever changes out of the function, and pass it as an argument. For deterministic sums, call "
        "`torch.use_deterministic_algorithms(True)`."
    ),
    bad="ampwise.diff(lambda: loss_fn(*next(batches)))",
    good="ampwise.diff(loss_fn, *next(batches))",
)


def check_difference(differing: StepDifference) -> Findings:
    floor = differing.floor
    if not floor or not differing.noise_matters:
        return
    how = "of a different shape" if math.isinf(floor) else f"{error_text(floor)} off"
    source = ""
    if differing.draws_from:
        named = ", ".join(f"`{name}`" for name in differing.draws_from)
        source = f"; it takes the next items of {named}, which differ each time"
    yield RULE.at(
        Place(module=differing.floor_at),
        f"two runs of a ({differing.a.label}) differ: `{differing.floor_at}` is {how} the second time{source}",
        evidence={"noise_floor": floor if math.isfinite(floor) else None},
    )
