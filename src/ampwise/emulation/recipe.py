"""How the operands of a product are rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.formats import BlockFormat, Format, find_format
from ampwise.formats.cast import Rounding, cast, kernels_for

__all__ = ["UP", "Recipe", "recipe_from", "recipe_named", "rounded", "scaled_up", "with_scales_up"]

STOCHASTIC, UP = "stochastic", "up"  # after the formats
# A format that has no more bits than this holds no tensor as it is: each gets a scale.
SCALED_UP_TO_BITS = 8
# What gradients are kept in where the format itself has too little range for them: NVIDIA's hybrid.
FOR_GRADIENTS = {"e4m3fn": "e5m2", "e4m3fnuz": "e5m2fnuz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The formats of a product's operands: of weights and activations, and of gradients.

    ``scaled``: an operand in a narrow format is multiplied, before it is rounded, by the scale that puts its largest
    magnitude at the format's largest value; block formats have scales of their own.
    """

    name: str
    forward: Format | BlockFormat
    backward: Format | BlockFormat
    scaled: bool
    rounding: Rounding = "nearest"  # of gradients; what is no gradient is rounded to nearest

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool) -> Tensor:
        """An operand, rounded; ``dim`` is the one that the product sums over."""
        fmt = self.backward if is_gradient else self.forward
        scaled = self.scaled and _is_narrow(fmt)
        return rounded(tensor, fmt, dim, scaled=scaled, rounding=self.rounding if is_gradient else "nearest")

    @property
    def text(self) -> str:
        """As ``recipe_from`` reads it."""
        usual = recipe_named(self.forward).backward == self.backward
        formats = self.forward.name if usual else f"{self.forward.name}/{self.backward.name}"
        words = [STOCHASTIC] * (self.rounding == STOCHASTIC) + [UP] * self.scales_up
        return ",".join([formats, *words])

    @property
    def scales_up(self) -> bool:
        """Whether the scales of MX formats are rounded up."""
        return any(isinstance(fmt, BlockFormat) and fmt.scales_up for fmt in (self.forward, self.backward))

    @property
    def needs_loss_scale(self) -> bool:
        """Gradients are rounded as they are, to a format that does not hold small ones."""
        return not (self.scaled and _is_narrow(self.backward)) and self.backward.needs_loss_scale

    @property
    def has_blocks(self) -> bool:
        """Whether it matters along which dimension one rounds."""
        return isinstance(self.forward, BlockFormat) or isinstance(self.backward, BlockFormat)


def recipe_named(
    name: str | Format | BlockFormat,
    gradients: str | Format | BlockFormat | None = None,
    rounding: Rounding = "nearest",
) -> Recipe:
    """The usual recipe of a format: E4M3 has E5M2 for gradients, every other format itself.

    >>> recipe = recipe_named("e4m3")
    >>> recipe.forward.name, recipe.backward.name, recipe.scaled
    ('e4m3fn', 'e5m2', True)
    >>> recipe_named("mxfp8").backward.name
    'mxfp8_e4m3'
    """
    forward = find_format(name)
    backward = find_format(FOR_GRADIENTS.get(forward.name, forward) if gradients is None else gradients)
    for fmt in (forward, backward):
        if isinstance(fmt, Format) and not fmt.signed:
            raise BadInput(f"{fmt.name} has no sign: it is a format of scales, and no product is computed in it.")
    scaled = _is_narrow(forward) or _is_narrow(backward)
    return Recipe(name=forward.name, forward=forward, backward=backward, scaled=scaled, rounding=rounding)


def _is_narrow(fmt: Format | BlockFormat) -> bool:
    return isinstance(fmt, BlockFormat) or fmt.bits <= SCALED_UP_TO_BITS


def recipe_from(text: str) -> Recipe:
    """A recipe by its text: ``FORMAT[/FORMAT OF GRADIENTS][,stochastic][,up]``.

    up: the scales of MX formats are rounded up, so that the largest value of a block is not cut off.

    >>> recipe_from("e4m3/e5m2") == recipe_named("e4m3")
    True
    >>> recipe_from("nvfp4,stochastic").rounding
    'stochastic'
    >>> recipe_from("mxfp8,up").text
    'mxfp8_e4m3,up'
    """
    formats, *words = (part.strip() for part in text.split(","))
    forward, slash, backward = (part.strip() for part in formats.partition("/"))
    if not set(words) <= {"nearest", STOCHASTIC, UP} or not forward or (slash and not backward):
        raise BadInput(
            f"emulate:{text}: expected is a format, one of its own for gradients if you like, how these are rounded, "
            "and for MX whether scales are rounded up: emulate:mxfp8, emulate:e4m3/e5m2, emulate:nvfp4,stochastic or "
            "emulate:mxfp8,up. `ampwise formats` lists formats."
        )
    recipe = recipe_named(forward, backward or None, "stochastic" if STOCHASTIC in words else "nearest")
    return with_scales_up(recipe, f"emulate:{text}") if UP in words else recipe


def with_scales_up(recipe: Recipe, asked: str) -> Recipe:
    """With the scales of MX formats rounded up; an error that begins with ``asked`` where there are none."""
    changed = replace(recipe, forward=scaled_up(recipe.forward), backward=scaled_up(recipe.backward))
    if not changed.scales_up:
        raise BadInput(f"{asked}: of these formats none has scales that are powers of two, as MX formats have.")
    return changed


def scaled_up(fmt: Format | BlockFormat) -> Format | BlockFormat:
    """The format itself where its scales are no powers of two."""
    return replace(fmt, scales_up=True) if isinstance(fmt, BlockFormat) and not fmt.tensor_scale else fmt


def rounded(
    tensor: Tensor, fmt: Format | BlockFormat, dim: int, *, scaled: bool, rounding: Rounding = "nearest"
) -> Tensor:
    """The values of a tensor as a product in this format reads them, in FP32 or wider.

    >>> rounded(torch.tensor([0.3, 1.0]), find_format("e4m3"), -1, scaled=True)
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
