from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.finding.call_site import CallSite

if TYPE_CHECKING:
    from ampwise.watch.time_use import TimeUse

RULE = Rule(
    code="AMP506",
    name="data-stall",
    severity=Severity.WARNING,
    summary="More than a quarter of the time is spent waiting for the DataLoader.",
    why=(
        "While the training loop waits for a batch, the GPU is idle, and half precision makes it worse: the faster the "
        "step, the larger the share of waiting. No precision helps while data loading is the limit."
    ),
    fix="Give the DataLoader more workers (`num_workers`, `persistent_workers=True`), or make loading an item cheaper.",
    bad="loader = DataLoader(images, batch_size=64, num_workers=0)",
    good="loader = DataLoader(images, batch_size=64, num_workers=8, persistent_workers=True, pin_memory=True)",
)
MUCH = 0.25
LEAST_STEPS = 5  # fewer are not representative


def check_time(use: TimeUse) -> Findings:
    share = use.data_wait_share
    if share is None or share <= MUCH or use.steps < LEAST_STEPS:
        return
    longest = max(use.data_waits, key=lambda site: use.data_waits[site], default=CallSite())
    each = use.data_wait_seconds / use.steps
    yield RULE.at(
        longest.place,
        f"{share:.0%} of the time is spent waiting for data: {1e3 * each:.0f} ms per step",
        evidence={"share": share, "steps": use.steps, "seconds": use.data_wait_seconds},
    )
