"""A loss scale that falls and falls."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.evidence.scaling import collapse
from ampwise.evidence.wording import scale_text
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP607",
    name="scale-collapse",
    severity=Severity.ERROR,
    summary="The loss scale falls step after step: nothing is learned, and torch's scaler has no floor.",
    why=(
        "At the start a scaler may skip a dozen steps until its scale fits. Later, eight skips in a row mean a scale "
        "256 times below one that had worked, and a scale below 1 makes gradients smaller than they are: then the "
        "scale is not the cause, and lowering it does not help. After some 165 overflows in a row torch's scale "
        "is 0.0, the check for infinities passes, and the next step destroys the weights."
    ),
    fix=(
        "Find what is not finite in the forward pass, the loss or the data; ampwise's GradScaler has a floor "
        "(`min_scale`) and stops there."
    ),
    bad='scaler = torch.amp.GradScaler("cuda")  # no floor',
    good='scaler = ampwise.GradScaler("cuda", min_scale=1.0)',
)


def check(health: Health) -> Iterator[Finding]:
    found = collapse(health)
    if found is None:
        return
    yield RULE.at(
        Place(step=found.step),
        f"{found.in_a_row} steps in a row were skipped, and the loss scale fell from {scale_text(found.from_scale)} "
        f"to {scale_text(found.to_scale)}",
        evidence={"times": found.in_a_row},
    )
