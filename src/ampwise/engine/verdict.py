"""What follows from the totals of a read: the norm, whether to skip, by how much to divide.

This is the definition, in torch operations that wait for nothing; ``kernel.py`` does the same in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MARGIN", "NO_CLIPPING", "Verdict", "judge"]

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

    @property
    def divisor(self) -> Tensor:
        """What clipping divides true gradients by: at least 1."""
        return self.numbers[2]

    @property
    def grad_scale(self) -> Tensor:
        """What gradients in memory are to be divided by: the scale and the divisor in one."""
        return self.numbers[3]


def judge(totals: Tensor, scale: Tensor | None, max_norm: float = NO_CLIPPING) -> Verdict:
    """The verdict on the totals [sum of squares, infinities, NaNs] of gradients in true units."""
    squares, infinities, nans = totals.unbind()
    norm = squares.sqrt()
    divisor = ((norm + MARGIN) / max_norm).clamp(min=1.0)
    plain = torch.ones_like(norm) if scale is None else scale.to(norm)
    grad_scale = (plain * divisor).float()
    # A divisor beyond FP32 would turn every gradient into zero: skipping is the careful choice.
    bad = (infinities + nans > 0) | ~grad_scale.isfinite()
    shown = torch.where(nans > 0, torch.nan, torch.where(infinities > 0, torch.inf, norm))
    return Verdict(
        torch.stack(
            [
                shown.float(),
                bad.float(),
                torch.where(bad, 1.0, divisor).float(),
                torch.where(bad, plain.float(), grad_scale),
            ]
        )
    )
