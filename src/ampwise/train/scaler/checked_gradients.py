"""Check gradients: read them once, and decide from that whether to step and how to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.scaler.grad_stats import GpuStats, GradStats, inverse_scale, read_gradients
from ampwise.train.scaler.gradients import OptimizerGradients, collect_gradients, first_device, multiply_
from ampwise.train.scaler.rank_reduction import NO_REDUCTION, RankReduction, make_reduction
from ampwise.train.scaler.step_decision import NO_CLIPPING, StepDecision, decide_step

__all__ = ["CheckedGradients", "check_gradients", "clip_in_memory_", "zero_norm"]


@dataclass(slots=True)
class CheckedGradients:
    """An optimizer's gradients with their statistics and the decision on its step, all still on the device."""

    gradients: OptimizerGradients
    stats: GradStats
    decision: StepDecision
    max_norm: float = NO_CLIPPING  # clipping that the step still has to do
    scaled: bool = False  # memory holds gradients of the scaled loss
    alone: bool = True  # decided without another optimizer's, or another rank's, gradients
    joint_with: frozenset[int] = frozenset()  # ids of the optimizers that were checked together

    @property
    def clips(self) -> bool:
        """Whether the step has to clip."""
        return self.max_norm != NO_CLIPPING

    @property
    def pending(self) -> bool:
        """Whether gradients in memory still have to be unscaled or clipped."""
        return self.scaled or self.clips

    def unscale_and_clip_(self) -> None:
        """Unscale and clip the gradients in memory, without a sync."""
        if self.pending:
            multiply_(self.gradients.values, inverse_scale(self.decision.grad_scale))
            self.scaled, self.max_norm = False, NO_CLIPPING
            self.gradients.record_versions()


def check_gradients(
    several: Sequence[OptimizerGradients],
    scale: Tensor | None,
    max_norm: float = NO_CLIPPING,
    *,
    home: torch.device,
    process_group: Any | None = None,
    unscale: bool = False,
) -> list[CheckedGradients]:
    """Check the gradients of one or several optimizers together.

    With ``unscale`` the same read also unscales them in memory; else the step does. ``home`` is the device for the
    small arithmetic.
    """
    readings = [read_gradients(gradients, scale, unscale=unscale) for gradients in several]
    agreements = [make_reduction(len(gradients), gradients.shards, process_group) for gradients in several]
    verdict = _verdict(readings, agreements, scale, max_norm, home)
    return [
        CheckedGradients(
            gradients,
            reading,
            verdict,
            max_norm=max_norm,
            scaled=scale is not None and not unscale,
            alone=agreements == [NO_REDUCTION],
        )
        for gradients, reading in zip(several, readings, strict=True)
    ]


def zero_norm(optimizers: Sequence[Optimizer]) -> Tensor:
    """Return the norm of no gradients: 0."""
    return torch.zeros((), dtype=torch.float32, device=first_device(optimizers))


def clip_in_memory_(
    optimizers: Sequence[Optimizer], max_norm: float, norm_type: float, process_group: Any | None
) -> Tensor:
    """Clip gradients that are already unscaled, by the norm of all of them together; return the norm."""
    if norm_type != 2.0:
        if process_group is not None:
            raise BadInput(f"clip_(norm_type={norm_type:g}): with a process_group, only norm_type=2 is supported.")
        parameters = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    every = [
        gradients for gradients in map(collect_gradients, optimizers) if len(gradients) or process_group is not None
    ]
    if not every:
        return zero_norm(optimizers)
    all_checked = check_gradients(every, None, max_norm, home=first_device(optimizers), process_group=process_group)
    for checked in all_checked:
        checked.unscale_and_clip_()
    return all_checked[0].decision.norm


def _verdict(
    readings: Sequence[GradStats],
    agreements: Sequence[RankReduction],
    scale: Tensor | None,
    max_norm: float,
    home: torch.device,
) -> StepDecision:
    parts = [part for reading in readings for part in reading.parts]
    if len(parts) == 1 and isinstance(parts[0], GpuStats) and agreements[0] is NO_REDUCTION:
        from ampwise.train.scaler.kernel import launch_decision

        if parts[0].counted.buffer.device == home:
            return launch_decision(parts[0].counted, scale, max_norm)
    totals = [
        agreement.reach(reading.totals(home, agreement.weights))
        for reading, agreement in zip(readings, agreements, strict=True)
    ]
    return decide_step(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0), scale, max_norm)
