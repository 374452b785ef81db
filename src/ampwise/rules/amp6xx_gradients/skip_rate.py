from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.gradient_health import GradientHealth

RULE = Rule(
    code="AMP609",
    name="skip-rate",
    severity=Severity.WARNING,
    summary="More than one step in twenty is skipped because gradients are not finite.",
    why=(
        "A skipped step costs its time and its batch, and the batches that overflow are not random: they have the "
        "largest gradients. By design a scaler skips one step per growth interval, 0.05%; the search at the start is "
        "not counted. A higher rate means that some batches have gradients far above the usual."
    ),
    fix="Inspect the batches that overflow; mask outliers in the data, use a longer `growth_interval`, or use BF16.",
    bad='scaler = torch.amp.GradScaler("cuda", growth_interval=10)',
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
    consequence_of=("AMP9", "AMP607", "AMP608", "AMP612", "AMP613"),
)

TOO_MANY = 0.05  # of the last steps
SKIPS = 5  # at least


def check_gradients(health: GradientHealth) -> Findings:
    share, skips = health.skip_share, sum(row.skipped for row in health.window)
    if share is None or share <= TOO_MANY or skips < SKIPS:
        return
    if not health.streaks.collapse() and not health.oscillation():  # those rules report the cause
        message = f"{skips} of the last {len(health.window)} steps were skipped ({share:.0%})"
        yield RULE.at(Place(step=health.last_step), message, evidence={"times": skips})
