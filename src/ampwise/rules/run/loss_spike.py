"""A sudden jump of the loss in a guarded run: reported at its step, with the action taken.

Shares its RULE with ``gradient``, which judges a watched run by all of its jumps.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.guard_event_text import event_evidence
from ampwise.rules.evidence.guard_events import LossSpike
from ampwise.rules.evidence.number_text import number_text
from ampwise.rules.gradient.loss_spike import RULE

__all__ = ["RULE", "check"]

ROLLS_BACK = "; the run rolls back to its last good state"
FIX_AFTER_ROLLBACK = (
    "Inspect the batches that are now skipped. If it recurs, clip gradients or lower the learning rate."
)


def check(spike: LossSpike) -> Iterator[Finding]:
    rolls_back = spike.action == "rollback"
    yield RULE.at(
        Place(step=spike.step),
        f"the loss jumped to {number_text(spike.loss)} from a usual {number_text(spike.usual)}, "
        f"{spike.spreads:.0f} times its "
        f"usual spread{ROLLS_BACK if rolls_back else ''}",
        evidence=event_evidence(spike),
        fix=FIX_AFTER_ROLLBACK if rolls_back else None,
    )
