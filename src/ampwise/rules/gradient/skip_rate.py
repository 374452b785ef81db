"""Many steps skipped, without one cause that has a rule of its own."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.health import Health
from ampwise.evidence.scaling import collapse, oscillation, skip_share
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP609",
    name="skip-rate",
    severity=Severity.WARNING,
    summary="More than one step in twenty is skipped because gradients are not finite.",
    why=(
        "A skipped step costs its time and its batch, and batches that overflow are not just any: they are the ones "
        "with the largest gradients. By design a scaler skips one step in each growth interval, 0.05%; the search at "
        "the start is not counted. More of it means that single batches have gradients far above the usual ones."
    ),
    fix="Look at the batches that overflow; mask outliers in the data, use a longer `growth_interval`, or BF16.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=10)',
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
)

TOO_MANY = 0.05  # of the last steps
SKIPS = 5  # at least


def check(health: Health) -> Iterator[Finding]:
    share = skip_share(health)
    skips = sum(row.skipped for row in health.window)
    if share is None or share <= TOO_MANY or skips < SKIPS:
        return
    if collapse(health) or oscillation(health):
        return  # said there, with the cause
    yield RULE.at(
        Place(step=health.last_step),
        f"{skips} of the last {len(health.window)} steps were skipped ({share:.0%})",
        evidence={"times": skips},
    )
