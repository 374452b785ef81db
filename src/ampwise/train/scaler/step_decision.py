"""The decision on a step, from gradient totals: the norm, whether to skip, and what to divide gradients by.

``decision_numbers`` is the definition, in plain numbers; ``kernel.py`` does the same on a GPU without a sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampwise.numbers.census.kernels import has_kernels
from ampwise.train.scaler.loss_scale import in_fp32

__all__ = ["CLIP_EPSILON", "NO_CLIPPING", "StepDecision", "decide_step", "decision_numbers"]

NO_CLIPPING = float("inf")
CLIP_EPSILON = 1e-6  # added to the norm as in clip_grad_norm_


@dataclass(slots=True)
class StepDecision:
    """Decision on one step: four FP32 numbers in one tensor on the device."""

    numbers: Tensor

    @property
    def norm(self) -> Tensor:
        """Norm of all unscaled gradients before clipping. NaN if there is a NaN, else infinity if there is one."""
        return self.numbers[0]

    @property
    def found_inf(self) -> Tensor:
        """Exactly 0 or 1, a 0-dim tensor: fused optimizers compare it with 1."""
        return self.numbers[1]

    def or_found(self, flags: Sequence[Tensor]) -> StepDecision:
        """Return the same decision, but skip also if one of the flags is set."""
        numbers = self.numbers.clone()
        numbers[1] = _worst([self.found_inf, *flags], numbers)
        return StepDecision(numbers)

    @property
    def divisor(self) -> Tensor:
        """What clipping divides unscaled gradients by: at least 1."""
        return self.numbers[2]

    @property
    def grad_scale(self) -> Tensor:
        """What gradients in memory must be divided by: scale times divisor."""
        return self.numbers[3]


def _worst(flags: Sequence[Tensor], like: Tensor) -> Tensor:
    return (torch.stack([flag.reshape(()).to(like) for flag in flags]).amax() > 0).to(like.dtype)


def decide_step(totals: Tensor, scale: Tensor | None, max_norm: float = NO_CLIPPING) -> StepDecision:
    """Return the decision for the totals [sum of squares, infinities, NaNs] of unscaled gradients."""
    if totals.is_cuda and has_kernels():
        from ampwise.train.scaler.kernel import launch_decision_from_totals

        return launch_decision_from_totals(totals, scale, max_norm)
    plain = 1.0 if scale is None else float(scale.item())
    squares, infinities, nans = totals.tolist()
    numbers = decision_numbers(squares, infinities, nans, plain, max_norm)
    return StepDecision(torch.tensor(numbers, dtype=torch.float32, device=totals.device))


def decision_numbers(
    squares: float, infinities: float, nans: float, scale: float, max_norm: float
) -> tuple[float, float, float, float]:
    """Return norm, found_inf, divisor and grad_scale."""
    norm = math.sqrt(squares)
    divisor = 1.0 if max_norm == NO_CLIPPING else max((norm + CLIP_EPSILON) / max_norm, 1.0)
    # A divisor beyond FP32's range would turn every gradient into zero, so skip.
    bad = bool(infinities or nans) or not math.isfinite(in_fp32(scale * divisor))
    shown = math.nan if nans else math.inf if infinities else norm
    return (shown, 1.0, 1.0, scale) if bad else (shown, 0.0, divisor, scale * divisor)
