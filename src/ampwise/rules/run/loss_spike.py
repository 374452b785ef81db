"""A loss that jumps, as the guard sees it: at the step, and with what is done about it.

The same rule as in ``gradient``, where the watch judges a run by all of its jumps.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of
from ampwise.evidence.faults import LossSpike
from ampwise.evidence.wording import number
from ampwise.finding import Finding, Place
from ampwise.rules.gradient.loss_spike import RULE

__all__ = ["RULE", "check"]

GOES_BACK = "; the run goes back to its last good state"
GONE_BACK = (
    "Look at the batches that are passed over from now on. If it comes again, clip gradients or lower the learning "
    "rate."
)


def check(spike: LossSpike) -> Iterator[Finding]:
    rolls_back = spike.action == "rollback"
    yield RULE.at(
        Place(step=spike.step),
        f"the loss jumped to {number(spike.loss)} from a usual {number(spike.usual)}, {spike.spreads:.0f} times its "
        f"ordinary spread{GOES_BACK if rolls_back else ''}",
        evidence=evidence_of(spike),
        fix=GONE_BACK if rolls_back else None,
    )
