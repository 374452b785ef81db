"""What follows from the totals of a read: the norm, whether to skip, by how much to divide.

``verdict_of`` is the definition, in plain numbers; ``kernel.py`` does the same on a GPU, where nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampwise.census.launcher import has_kernels
from ampwise.engine.scaling.scale import in_fp32

__all__ = ["MARGIN", "NO_CLIPPING", "Verdict", "judge", "verdict_of"]

NO_CLIPPING = float("inf")
MARGIN = 1e-6  # what clip_grad_norm_ adds to the norm, so that the two clip alike


@dataclass(slots=True)
class Verdict:
    """Numbers of one step, on the device: four FP32 next to each other."""

    numbers: Tensor

    @property
    def norm(self) -> Tensor:
        """Of all gradients in true units, before clipping. NaN beats infinity beats a number."""
        return self.numbers[0]

    @property
    def found_inf(self) -> Tensor:
        """Exactly 0 or 1, without dimensions: fused optimizers compare it with 1."""
        return self.numbers[1]

    def or_found(self, flags: Sequence[Tensor]) -> Verdict:
        """The same, and skipped also if one of the flags is set."""
        numbers = self.numbers.clone()
        numbers[1] = _worst([self.found_inf, *flags], numbers)
        return Verdict(numbers)

    @property
    def divisor(self) -> Tensor:
        """What clipping divides true gradients by: at least 1."""
        return self.numbers[2]

    @property
    def grad_scale(self) -> Tensor:
        """What gradients in memory are to be divided by: the scale and the divisor in one."""
        return self.numbers[3]


def _worst(flags: Sequence[Tensor], like: Tensor) -> Tensor:
    return (torch.stack([flag.reshape(()).to(like) for flag in flags]).amax() > 0).to(like.dtype)


def judge(totals: Tensor, scale: Tensor | None, max_norm: float = NO_CLIPPING) -> Verdict:
    """The verdict on the totals [sum of squares, infinities, NaNs] of gradients in true units."""
    if totals.is_cuda and has_kernels():
        from ampwise.engine.scaling.kernel import launch_judge_totals

        return launch_judge_totals(totals, scale, max_norm)
    plain = 1.0 if scale is None else float(scale.item())
    squares, infinities, nans = totals.tolist()
    numbers = verdict_of(squares, infinities, nans, plain, max_norm)
    return Verdict(torch.tensor(numbers, dtype=torch.float32, device=totals.device))


def verdict_of(
    squares: float, infinities: float, nans: float, scale: float, max_norm: float
) -> tuple[float, float, float, float]:
    """Norm, found_inf, divisor, grad_scale."""
    norm = math.sqrt(squares)
    divisor = 1.0 if max_norm == NO_CLIPPING else max((norm + MARGIN) / max_norm, 1.0)
    # A divisor beyond FP32 would turn every gradient into zero: skipping is the careful choice.
    bad = bool(infinities or nans) or not math.isfinite(in_fp32(scale * divisor))
    shown = math.nan if nans else math.inf if infinities else norm
    return (shown, 1.0, 1.0, scale) if bad else (shown, 0.0, divisor, scale * divisor)
