"""Gradients in NVFP4 that keep their mean, with less noise than stochastic rounding: MS-EDEN.

As in "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation" (IST Austria, 2026,
arXiv:2601.22813). Both operands of a matmul of the backward pass are rotated along the dimension that it sums over, by
a Hadamard matrix with signs drawn anew, and rounded to nearest. That shortens a vector; its scales are made longer by
as much, and only they are rounded stochastically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.numbers.emulation.recipe import EmulationRecipe, hadamard, round_operand
from ampwise.numbers.formats import BlockFormat
from ampwise.numbers.formats.cast import ROOM_FOR_FOUR, cast

TOGETHER = 128  # values that are rotated and corrected together
# The element that a block's largest magnitude becomes, a bit beyond the format's 6: loses least of normal values.
ONTO = 6 / (17 / 16 * 0.93)


def eden_operands(
    operands: tuple[Tensor, Tensor], dims: tuple[int, int], recipe: EmulationRecipe, are_gradients: tuple[bool, ...]
) -> list[Tensor]:
    """Return both operands of a backward matmul, rotated by the same matrix and rounded.

    Weights and activations are first rounded as their forward matmul did, along the other dimension.
    """
    signs = 1.0 - 2 * torch.randint(2, (TOGETHER,), device=operands[0].device)
    made = []
    for operand, dim, is_gradient in zip(operands, dims, are_gradients, strict=True):
        assert isinstance(recipe.backward, BlockFormat)
        seen_forward = not is_gradient and operand.dim() > 1
        given = round_operand(operand, recipe.forward, -3 - dim, scaled=False) if seen_forward else operand
        made.append(round_by_eden(hadamard(given, dim, signs), recipe.backward, dim))
    return made


def round_by_eden(rotated: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Round values whose number along ``dim`` is a multiple of 128; not finite ones make NaN of all 128.

    >>> from ampwise.numbers.formats import find_format
    >>> x = torch.linspace(-1, 1, 128)
    >>> abs(float(x @ round_by_eden(x, find_format("nvfp4"), 0) / (x @ x)) - 1) < 0.05
    True
    """
    blocks = rotated.movedim(dim, -1).unflatten(-1, (-1, TOGETHER // fmt.block_size, fmt.block_size))
    largest = blocks.abs().amax(-1, keepdim=True) / ONTO
    # Scales of blocks need room to become larger by the correction, as four-over-six needs it.
    whole = largest.amax() / ROOM_FOR_FOUR if largest.numel() else largest.new_ones(())
    whole = torch.where(whole > 0, whole, 1.0)
    scales = cast(largest / whole, fmt.scale).clamp(min=fmt.scale.smallest)
    elements = cast(blocks / (scales * whole), fmt.element, saturate=True)
    short = elements * scales * whole
    kept = (blocks * short).sum((-2, -1), keepdim=True)
    longer = torch.where(kept > 0, blocks.square().sum((-2, -1), keepdim=True) / kept, 1.0)
    longer = torch.where(blocks.isfinite().all(), longer, torch.nan)
    values = elements * cast(scales * longer, fmt.scale, "stochastic", saturate=True) * whole
    rounded: Tensor = values.flatten(-3).movedim(-1, dim).to(rotated.dtype)
    return rounded
