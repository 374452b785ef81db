from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.numbers.number_text import scale_text

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP607",
    name="scale-collapse",
    severity=Severity.ERROR,
    summary="The loss scale keeps falling: nothing is learned, and torch's scaler has no lower limit.",
    why=(
        "At the start, a scaler may skip a dozen steps until its scale fits. Later, eight skips in a row mean a scale "
        "256 times below one that worked, and a scale below 1 makes gradients smaller than they are: the scale is "
        "then not the cause, and lowering it does not help. After about 165 overflows in a row torch's scale is 0.0, "
        "the check for inf passes, and the next step destroys the weights."
    ),
    fix=(
        "Find what is not finite in the forward pass, the loss or the data. `ampwise.GradScaler` has a lower limit, "
        "`min_scale`, and stops there."
    ),
    bad='scaler = torch.amp.GradScaler("cuda")  # no lower limit',
    good='scaler = ampwise.GradScaler("cuda", min_scale=1.0)',
    consequence_of=("AMP9", "AMP612", "AMP613"),
)


def check_gradients(health: GradientHealth) -> Findings:
    found = health.streaks.collapse()
    if found is not None:
        steps = found.last - found.first + 1
        which = f"{found.count} steps in a row" if found.count == steps else f"{found.count} of {steps:,} steps"
        evidence: dict[str, object] = {"times": found.count}
        again = ""
        if found.bad_losses and found.good_losses > found.bad_losses:
            # What made the loss bad at first is not why the later steps were skipped.
            again = f", though the loss was finite in {found.good_losses} of these steps"
            evidence["links"] = {"consequence_of": ["AMP613"]}
        yield RULE.at(
            Place(step=found.first),
            f"{which} were skipped, and the loss scale fell from {scale_text(found.first_scale)} to "
            f"{scale_text(found.lowest_scale)}{again}",
            evidence=evidence,
        )
