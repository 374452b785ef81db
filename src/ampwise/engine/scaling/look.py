"""A look at gradients: one read, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.engine.scaling.agreement import ALONE, Agreement, agreement_on
from ampwise.engine.scaling.gradients import Gradients, gradients_of, home_of, multiply_
from ampwise.engine.scaling.reading import Launched, Reading, inverse_of, read
from ampwise.engine.scaling.verdict import NO_CLIPPING, Verdict, judge
from ampwise.errors import BadInput

__all__ = ["Look", "clip_in_memory_", "look_at", "no_norm"]


@dataclass(slots=True)
class Look:
    """What is known of an optimizer's gradients before its step, all of it still on the device."""

    gradients: Gradients
    reading: Reading
    verdict: Verdict
    max_norm: float = NO_CLIPPING  # clipping that the step has yet to do
    scaled: bool = False  # memory holds gradients of the scaled loss
    alone: bool = True  # judged without another optimizer's, or another rank's, gradients
    company: frozenset[int] = frozenset()  # of optimizers that were judged together

    @property
    def clips(self) -> bool:
        """The step is to clip."""
        return self.max_norm != NO_CLIPPING

    @property
    def pending(self) -> bool:
        """Gradients in memory are not yet what the optimizer should see."""
        return self.scaled or self.clips

    def settle_(self) -> None:
        """Divide the gradients in memory, without waiting."""
        if self.pending:
            multiply_(self.gradients.values, inverse_of(self.verdict.grad_scale))
            self.scaled, self.max_norm = False, NO_CLIPPING
            self.gradients.take_stock()


def look_at(
    several: Sequence[Gradients],
    scale: Tensor | None,
    max_norm: float = NO_CLIPPING,
    *,
    home: torch.device,
    process_group: Any | None = None,
    unscale: bool = False,
) -> list[Look]:
    """Look at the gradients of one or several optimizers, judged together.

    With ``unscale`` the same read leaves them unscaled in memory; else it is left to the step. ``home`` is the
    device where the small arithmetic is done.
    """
    readings = [read(gradients, scale, unscale=unscale) for gradients in several]
    agreements = [agreement_on(len(gradients), gradients.shards, process_group) for gradients in several]
    verdict = _verdict(readings, agreements, scale, max_norm, home)
    return [
        Look(
            gradients,
            reading,
            verdict,
            max_norm=max_norm,
            scaled=scale is not None and not unscale,
            alone=agreements == [ALONE],
        )
        for gradients, reading in zip(several, readings, strict=True)
    ]


def no_norm(optimizers: Sequence[Optimizer]) -> Tensor:
    """That of no gradients at all."""
    return torch.zeros((), dtype=torch.float32, device=home_of(optimizers))


def clip_in_memory_(
    optimizers: Sequence[Optimizer], max_norm: float, norm_type: float, process_group: Any | None
) -> Tensor:
    """Clip gradients that are in true units already, by the norm of all of them together; returns the norm."""
    if norm_type != 2.0:
        if process_group is not None:
            raise BadInput(f"clip_(norm_type={norm_type:g}): over a process_group only the norm of type 2 is summed.")
        parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    every = [gradients for gradients in map(gradients_of, optimizers) if len(gradients) or process_group is not None]
    if not every:
        return no_norm(optimizers)
    looks = look_at(every, None, max_norm, home=home_of(optimizers), process_group=process_group)
    for look in looks:
        look.settle_()
    return looks[0].verdict.norm


def _verdict(
    readings: Sequence[Reading],
    agreements: Sequence[Agreement],
    scale: Tensor | None,
    max_norm: float,
    home: torch.device,
) -> Verdict:
    parts = [part for reading in readings for part in reading.parts]
    if len(parts) == 1 and isinstance(parts[0], Launched) and agreements[0] is ALONE:
        from ampwise.engine.scaling.kernel import launch_judge

        if parts[0].counted.buffer.device == home:
            return launch_judge(parts[0].counted, scale, max_norm)
    totals = [
        agreement.reach(reading.totals(home, agreement.weights))
        for reading, agreement in zip(readings, agreements, strict=True)
    ]
    return judge(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0), scale, max_norm)
