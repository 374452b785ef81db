"""How the operands of an emulated matmul are rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.numbers.formats import BlockFormat, Format, find_format
from ampwise.numbers.formats.cast import Rounding, cast, kernels_for

# Options, after the formats.
NEAREST, STOCHASTIC, UP, PLAIN, FOUR_OVER_SIX, EDEN = "nearest", "stochastic", "up", "plain", "four-over-six", "eden"
OPTIONS = frozenset({NEAREST, STOCHASTIC, UP, PLAIN, FOUR_OVER_SIX, EDEN})
# Formats of up to this many bits need a scale for each tensor.
SCALED_UP_TO_BITS = 8
# Formats of gradients where the format itself has too little range for them, as in NVIDIA's hybrid recipe.
FOR_GRADIENTS = {"e4m3fn": "e5m2", "e4m3fnuz": "e5m2fnuz"}
# Formats in which models train by a published recipe: see ``EmulationRecipe.pretraining``.
WITH_PRETRAINING = frozenset({"nvfp4"})
SIDE = 16  # of a weight's square blocks, and of the Hadamard matrix
SIGNS = 0x9D1B  # of its rows, drawn once, as bits


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationRecipe:
    """Formats of a matmul's operands: of weights and activations (forward), and of gradients (backward).

    ``scaled``: before rounding, an operand in a narrow format is multiplied by the scale that puts its largest
    magnitude at the format's largest value; block formats have scales of their own.

    ``pretraining``: the recipe of "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025, arXiv:2509.25149). Only
    matmuls of weights are narrow, and all others in BF16, as are those of ``kept_layers``. A weight has a scale for
    each 16×16 values, so that it is the same in the forward pass and for the input's gradient. Both operands of the
    weight's gradient are multiplied by a random Hadamard matrix first. Gradients are rounded stochastically.

    ``eden``: the pretraining recipe with the rounding of ``ampwise.numbers.emulation.eden``. Weights are in blocks of
    16, as activations.
    """

    name: str
    forward: Format | BlockFormat
    backward: Format | BlockFormat
    scaled: bool
    rounding: Rounding = "nearest"  # of gradients; all other operands are rounded to nearest
    pretraining: bool = False
    eden: bool = False

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool, is_weight: bool = False) -> Tensor:
        """Return a rounded operand; ``dim`` is the dimension that the matmul sums over."""
        fmt = self.backward if is_gradient else self.forward
        in_squares = self.pretraining and not self.eden and is_weight and not is_gradient and tensor.dim() > 1
        if in_squares and isinstance(fmt, BlockFormat):
            return round_in_squares(tensor, fmt)
        scaled = self.scaled and _is_narrow(fmt)
        return round_operand(tensor, fmt, dim, scaled=scaled, rounding=self.rounding if is_gradient else "nearest")

    @property
    def text(self) -> str:
        """Text that ``parse_recipe`` parses."""
        usual = recipe_for_format(self.forward).backward == self.backward
        formats = self.forward.name if usual else f"{self.forward.name}/{self.backward.name}"
        could = usual and self.forward.name in WITH_PRETRAINING
        words = [PLAIN] * (could and not self.pretraining)
        if self.rounding != (STOCHASTIC if self.pretraining else NEAREST):
            words.append(self.rounding)
        words += [UP] * self.scales_up + [EDEN if self.eden else FOUR_OVER_SIX] * self.four_over_six
        return ",".join([formats, *words])

    @property
    def scales_up(self) -> bool:
        """Whether the scales of MX formats are rounded up."""
        return any(isinstance(fmt, BlockFormat) and fmt.scales_up for fmt in (self.forward, self.backward))

    @property
    def four_over_six(self) -> bool:
        """Whether the largest value of a block becomes the element 4 or 6, whichever loses less."""
        return any(isinstance(fmt, BlockFormat) and fmt.four_over_six for fmt in (self.forward, self.backward))

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


BF16 = recipe_for_format("bf16")  # of what a pretraining recipe leaves wide


def parse_recipe(text: str) -> EmulationRecipe:
    """Parse a recipe: ``FORMAT[/FORMAT OF GRADIENTS][,OPTION...]``.

    NVFP4 for both is the pretraining recipe. Options: ``plain``, without it; ``stochastic`` and ``nearest``, rounding
    of gradients; ``up``, scales of MX formats rounded up, so that the largest value of a block does not saturate;
    ``four-over-six``, NVFP4's largest value of a block as a 4 or a 6; ``eden``, that in the forward pass of the
    pretraining recipe, and MS-EDEN in the backward pass.

    >>> parse_recipe("e4m3/e5m2") == recipe_for_format("e4m3")
    True
    >>> parse_recipe("nvfp4").pretraining, parse_recipe("nvfp4,plain") == recipe_for_format("nvfp4")
    (True, True)
    >>> parse_recipe("mxfp8,up").text
    'mxfp8_e4m3,up'
    """
    formats, *words = (part.strip() for part in text.split(","))
    forward, slash, backward = (part.strip() for part in formats.partition("/"))
    if (
        not OPTIONS.issuperset(words)
        or len({NEAREST, STOCHASTIC, EDEN}.intersection(words)) > 1
        or not forward
        or (slash and not backward)
    ):
        raise BadInput(
            f"emulate:{text}: expected FORMAT[/FORMAT OF GRADIENTS][,stochastic][,up][,plain][,four-over-six][,eden], "
            "such as emulate:mxfp8, emulate:e4m3/e5m2 or emulate:mxfp8,up. `ampwise formats` lists formats."
        )
    recipe = recipe_for_format(forward, backward or None)
    pretraining = recipe.forward == recipe.backward and recipe.forward.name in WITH_PRETRAINING
    if PLAIN in words and not pretraining:
        raise BadInput(
            f"emulate:{text}: only {', '.join(sorted(WITH_PRETRAINING))} has a recipe to leave out by plain."
        )
    pretraining = pretraining and PLAIN not in words
    is_stochastic = STOCHASTIC in words or (pretraining and NEAREST not in words)
    recipe = replace(recipe, rounding="stochastic" if is_stochastic else "nearest", pretraining=pretraining)
    if EDEN in words and not pretraining:
        raise BadInput(f"emulate:{text}: eden needs the pretraining recipe, as in emulate:nvfp4,eden.")
    recipe = replace(recipe, eden=EDEN in words)
    if recipe.eden or FOUR_OVER_SIX in words:
        recipe = _with_four_over_six(recipe, f"emulate:{text}")
    return recipe_with_scales_rounded_up(recipe, f"emulate:{text}") if UP in words else recipe


def _with_four_over_six(recipe: EmulationRecipe, asked: str) -> EmulationRecipe:
    def changed(fmt: Format | BlockFormat) -> Format | BlockFormat:
        return replace(fmt, four_over_six=True) if isinstance(fmt, BlockFormat) and fmt.tensor_scale else fmt

    recipe = replace(recipe, forward=changed(recipe.forward), backward=changed(recipe.backward))
    if not recipe.four_over_six:
        raise BadInput(f"{asked}: four-over-six needs NVFP4, whose scales are not powers of two.")
    return recipe


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


def round_in_squares(tensor: Tensor, fmt: BlockFormat) -> Tensor:
    """Round matrices with a scale for each 16×16 values: a matrix and its transpose then have the same values.

    Values beyond the edges count as zeros.
    """
    rows, columns = tensor.shape[-2:]
    padded = torch.nn.functional.pad(tensor, (0, -columns % SIDE, 0, -rows % SIDE))
    tiles = padded.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE)).transpose(-3, -2)
    as_blocks = round_operand(tiles.flatten(-2), replace(fmt, block_size=SIDE * SIDE), -1, scaled=False)
    square: Tensor = as_blocks.unflatten(-1, (SIDE, SIDE)).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return square[..., :rows, :columns]


def hadamard(tensor: Tensor, dim: int, signs: Tensor | None = None) -> Tensor:
    """Multiply each 16 values along a dimension by a Hadamard matrix with random signs, which is orthogonal.

    Outliers are spread over the 16. If both operands of a matmul are transformed along the dimension that it sums over,
    the product stays the same. The dimension is padded with zeros. The signs are the same everywhere and always, as in
    the paper, unless given: then as many values as signs are transformed together, a power of two.

    >>> x = torch.eye(16)
    >>> torch.allclose(hadamard(x, -1) @ hadamard(x, -1).T, x, atol=1e-6)
    True
    """
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    # Computed, as a CUDA graph could not capture a copy from the host.
    number = torch.arange(SIDE if signs is None else len(signs), device=tensor.device)
    if signs is None:
        signs = 1 - 2 * ((SIGNS >> number) & 1)
    along = wide.movedim(dim, -1)
    blocks = torch.nn.functional.pad(along, (0, -along.shape[-1] % len(number))).unflatten(-1, (-1, len(number)))
    odd = number[:, None] & number  # of both places' bits; folded until the lowest is whether they are odd
    for shift in (8, 4, 2, 1):
        odd = odd ^ (odd >> shift)
    matrix = (1 - 2 * (odd & 1)) * signs[:, None] / len(number) ** 0.5
    spread: Tensor = (blocks @ matrix.to(wide.dtype)).flatten(-2).movedim(-1, dim)
    return spread
