"""BF16 on a device that emulates it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place
from ampwise.rules.evidence.run_events import RunEvents
from ampwise.rules.hardware.bf16_without_matrix_units import RULE

__all__ = ["RULE", "check"]


def check(run: RunEvents) -> Iterator[Finding]:
    if run.bf16_emulated_on is not None:
        yield RULE.at(Place(device=run.bf16_emulated_on), f"BF16 was used on {run.bf16_emulated_on}, which emulates it")
