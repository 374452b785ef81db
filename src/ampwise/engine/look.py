"""A look at gradients: one read, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampwise.engine.agreement import ALONE, Agreement, agreement_on
from ampwise.engine.gradients import Gradients, multiply_
from ampwise.engine.reading import Launched, Reading, inverse_of, read
from ampwise.engine.verdict import NO_CLIPPING, Verdict, judge

__all__ = ["Look", "look_at"]


@dataclass(slots=True)
class Look:
    """What is known of an optimizer's gradients before its step, all of it still on the device."""

    gradients: Gradients
    reading: Reading
    verdict: Verdict
    max_norm: float = NO_CLIPPING  # clipping that the step has yet to do
    scaled: bool = False  # memory holds gradients of the scaled loss
    alone: bool = True  # not clipped together with another optimizer's
    stamp: list[tuple[int, int]] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Gradients in memory are not yet what the optimizer should see."""
        return self.scaled or self.max_norm != NO_CLIPPING

    def settle_(self) -> None:
        """Divide the gradients in memory, without waiting."""
        if self.pending:
            multiply_(self.gradients.values, inverse_of(self.verdict.grad_scale))
            self.scaled, self.max_norm = False, NO_CLIPPING


def look_at(
    several: Sequence[Gradients],
    scale: Tensor | None,
    max_norm: float = NO_CLIPPING,
    *,
    process_group: Any | None = None,
    unscale: bool = False,
) -> list[Look]:
    """Look at the gradients of one or several optimizers, judged together.

    With ``unscale`` the same read leaves them unscaled in memory; else it is left to the step.
    """
    readings = [read(gradients, scale, unscale=unscale) for gradients in several]
    agreements = [agreement_on(len(gradients), gradients.shards, process_group) for gradients in several]
    verdict = _verdict(readings, agreements, scale, max_norm, _home(several, scale))
    return [
        Look(
            gradients,
            reading,
            verdict,
            max_norm=max_norm,
            scaled=scale is not None and not unscale,
            alone=len(several) == 1,
            stamp=gradients.stamp,
        )
        for gradients, reading in zip(several, readings, strict=True)
    ]


def _home(several: Sequence[Gradients], scale: Tensor | None) -> torch.device:
    """Where the small arithmetic is done."""
    return several[0].values[0].device if scale is None else scale.device


def _verdict(
    readings: Sequence[Reading],
    agreements: Sequence[Agreement],
    scale: Tensor | None,
    max_norm: float,
    home: torch.device,
) -> Verdict:
    parts = [part for reading in readings for part in reading.parts]
    if len(parts) == 1 and isinstance(parts[0], Launched) and agreements[0] is ALONE:
        from ampwise.engine.kernel import launch_judge

        if parts[0].counted.buffer.device == home:
            return launch_judge(parts[0].counted, scale, max_norm)
    totals = [
        agreement.reach(reading.totals(home, agreement.weights))
        for reading, agreement in zip(readings, agreements, strict=True)
    ]
    return judge(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0), scale, max_norm)
