"""How the operands of an emulated matmul are rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.numbers.formats import BlockFormat, Format, find_format
from ampwise.numbers.formats.cast import Rounding, cast, kernels_for

STOCHASTIC, UP = "stochastic", "up"  # after the formats
# Formats of up to this many bits need a scale for each tensor.
SCALED_UP_TO_BITS = 8
# Formats of gradients where the format itself has too little range for them, as in NVIDIA's hybrid recipe.
FOR_GRADIENTS = {"e4m3fn": "e5m2", "e4m3fnuz": "e5m2fnuz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationRecipe:
    """Formats of a matmul's operands: of weights and activations (forward), and of gradients (backward).

    ``scaled``: before rounding, an operand in a narrow format is multiplied by the scale that puts its largest
    magnitude at the format's largest value; block formats have scales of their own.
    """

    name: str
    forward: Format | BlockFormat
    backward: Format | BlockFormat
    scaled: bool
    rounding: Rounding = "nearest"  # of gradients; all other operands are rounded to nearest

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool) -> Tensor:
        """Return a rounded operand; ``dim`` is the dimension that the matmul sums over."""
        fmt = self.backward if is_gradient else self.forward
        scaled = self.scaled and _is_narrow(fmt)
        return round_operand(tensor, fmt, dim, scaled=scaled, rounding=self.rounding if is_gradient else "nearest")

    @property
    def text(self) -> str:
        """Text that ``parse_recipe`` parses."""
        usual = recipe_for_format(self.forward).backward == self.backward
        formats = self.forward.name if usual else f"{self.forward.name}/{self.backward.name}"
        words = [STOCHASTIC] * (self.rounding == STOCHASTIC) + [UP] * self.scales_up
        return ",".join([formats, *words])

    @property
    def scales_up(self) -> bool:
        """Whether the scales of MX formats are rounded up."""
        return any(isinstance(fmt, BlockFormat) and fmt.scales_up for fmt in (self.forward, self.backward))

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients are rounded without a scale to a format that cannot hold small ones."""
        return not (self.scaled and _is_narrow(self.backward)) and self.backward.needs_loss_scale

    @property
    def has_blocks(self) -> bool:
        """Whether it has a block format, so that the dimension of rounding matters."""
        return isinstance(self.forward, BlockFormat) or isinstance(self.backward, BlockFormat)


def recipe_for_format(
    name: str | Format | BlockFormat,
    gradients: str | Format | BlockFormat | None = None,
    rounding: Rounding = "nearest",
) -> EmulationRecipe:
    """Return the usual recipe of a format: E4M3 uses E5M2 for gradients, every other format itself.

    >>> recipe = recipe_for_format("e4m3")
    >>> recipe.forward.name, recipe.backward.name, recipe.scaled
    ('e4m3fn', 'e5m2', True)
    >>> recipe_for_format("mxfp8").backward.name
    'mxfp8_e4m3'
    """
    forward = find_format(name)
    backward = find_format(FOR_GRADIENTS.get(forward.name, forward) if gradients is None else gradients)
    for fmt in (forward, backward):
        if isinstance(fmt, Format) and not fmt.signed:
            raise BadInput(f"{fmt.name} is an unsigned format for scales, not for matmuls. Choose a signed format.")
    scaled = _is_narrow(forward) or _is_narrow(backward)
    return EmulationRecipe(name=forward.name, forward=forward, backward=backward, scaled=scaled, rounding=rounding)


def _is_narrow(fmt: Format | BlockFormat) -> bool:
    return isinstance(fmt, BlockFormat) or fmt.bits <= SCALED_UP_TO_BITS


def parse_recipe(text: str) -> EmulationRecipe:
    """Parse a recipe: ``FORMAT[/FORMAT OF GRADIENTS][,stochastic][,up]``.

    up: round the scales of MX formats up, so that the largest value of a block does not saturate.

    >>> parse_recipe("e4m3/e5m2") == recipe_for_format("e4m3")
    True
    >>> parse_recipe("nvfp4,stochastic").rounding
    'stochastic'
    >>> parse_recipe("mxfp8,up").text
    'mxfp8_e4m3,up'
    """
    formats, *words = (part.strip() for part in text.split(","))
    forward, slash, backward = (part.strip() for part in formats.partition("/"))
    if not set(words) <= {"nearest", STOCHASTIC, UP} or not forward or (slash and not backward):
        raise BadInput(
            f"emulate:{text}: expected FORMAT[/FORMAT OF GRADIENTS][,stochastic][,up], such as emulate:mxfp8, "
            "emulate:e4m3/e5m2, emulate:nvfp4,stochastic or emulate:mxfp8,up. `ampwise formats` lists formats."
        )
    recipe = recipe_for_format(forward, backward or None, "stochastic" if STOCHASTIC in words else "nearest")
    return recipe_with_scales_rounded_up(recipe, f"emulate:{text}") if UP in words else recipe


def recipe_with_scales_rounded_up(recipe: EmulationRecipe, asked: str) -> EmulationRecipe:
    """Return the recipe with MX scales rounded up; without MX formats, raise an error that begins with ``asked``."""
    changed = replace(
        recipe, forward=with_scales_rounded_up(recipe.forward), backward=with_scales_rounded_up(recipe.backward)
    )
    if not changed.scales_up:
        raise BadInput(f"{asked}: rounding scales up needs an MX format, whose scales are powers of two.")
    return changed


def with_scales_rounded_up(fmt: Format | BlockFormat) -> Format | BlockFormat:
    """Return the format with its scales rounded up, if it is an MX format; else the format itself."""
    return replace(fmt, scales_up=True) if isinstance(fmt, BlockFormat) and not fmt.tensor_scale else fmt


def round_operand(
    tensor: Tensor, fmt: Format | BlockFormat, dim: int, *, scaled: bool, rounding: Rounding = "nearest"
) -> Tensor:
    """Return a tensor's values as a matmul in this format reads them, in FP32 or wider.

    >>> round_operand(torch.tensor([0.3, 1.0]), find_format("e4m3"), -1, scaled=True)
    tensor([0.2857, 1.0000])
    """
    if (fused := kernels_for(tensor, fmt)) is not None:
        by_chance, scaled = rounding == "stochastic", scaled and isinstance(fmt, Format)
        return fused(tensor, fmt, dim=dim, stochastic=by_chance, scaled=scaled, dtype=torch.float32)
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    if isinstance(fmt, BlockFormat) or not scaled:
        return cast(wide, fmt, rounding, dim=dim)
    largest = wide.abs().amax() if wide.numel() else wide.new_zeros(())
    usable = largest.isfinite() & (largest > 0)
    scale = (
        torch.where(usable, fmt.max / largest.double(), 1.0).clamp(max=torch.finfo(torch.float32).max).to(wide.dtype)
    )
    return cast(wide * scale, fmt, rounding, saturate=True) / scale
