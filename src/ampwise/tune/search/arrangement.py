"""The formats to choose among, and how they are applied to the modules of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import UP, EmulationRecipe, recipe_for_format, with_scales_rounded_up
from ampwise.numbers.formats import BlockFormat, Format, find_format
from ampwise.train.precision.call_in_precision import REGIONS, cast_inputs, wrap_forward
from ampwise.train.precision.policy import name_and_parents
from ampwise.tune.search.units import REST, SearchUnit

DEFAULT_FORMATS = ("e4m3", "bf16", "fp32")
WIDEST = "fp32"
MOST_BITS = 9  # of an emulated format: 8, and a block's share of its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """A format that a module may have.

    A format of 8 bits or fewer is emulated in a 16-bit region, as in FP8 training: inputs and outputs have 16 bits, and
    only the matmuls read fewer.
    """

    name: str
    bits: float  # of an operand
    region: str
    recipe: EmulationRecipe | None = None

    @property
    def narrow(self) -> bool:
        """Whether it is emulated."""
        return self.recipe is not None

    @property
    def peak(self) -> str:
        """The name of its tensor-core peak in the hardware catalog.

        >>> [choice.peak for choice in parse_formats(["e4m3", "mxfp8", "bf16", "fp32"])]
        ['fp8', 'mxfp8', 'bf16', 'fp32']
        """
        if self.recipe is None:
            return self.name
        fmt = self.recipe.forward
        return fmt.name.partition("_")[0] if isinstance(fmt, BlockFormat) else f"fp{fmt.bits}"


def parse_formats(names: Iterable[str]) -> tuple[FormatChoice, ...]:
    """Parse format names and sort them by bits, narrowest first; equal ones in the order given.

    "mxfp8+up" is MXFP8 with scales that are rounded up.

    >>> [choice.name for choice in parse_formats(("fp32", "bf16", "mxfp8+up"))]
    ['mxfp8+up', 'bf16', 'fp32']
    """
    given = [names] if isinstance(names, str) else list(names)
    formats: list[Format | BlockFormat] = []
    for name in given:
        if not isinstance(name, str):
            raise BadInput(f"search(formats={given!r}): expected names of formats, such as {DEFAULT_FORMATS!r}.")
        formats.append(_format(name))
    for place, name in enumerate(given):
        if formats[place] in formats[:place]:
            raise BadInput(f"search(formats=...): {name!r} is listed twice.")
    regions = [fmt.name for fmt in formats if fmt.name in REGIONS]
    if WIDEST not in regions or len(formats) < 2:
        raise BadInput(
            f"search(formats={tuple(given)!r}): expected {WIDEST!r}, for what must stay wide, and a narrower one, "
            f"such as {DEFAULT_FORMATS!r}."
        )
    # FP8 hardware has BF16 inputs and outputs; FP16 is used only if BF16 is not among the formats.
    carrier = "fp16" if "fp16" in regions and "bf16" not in regions else "bf16"
    choices = [
        FormatChoice(name=fmt.name, bits=_bits(fmt), region=fmt.name)
        if fmt.name in REGIONS
        else FormatChoice(name=name.strip().lower(), bits=_bits(fmt), region=carrier, recipe=recipe_for_format(fmt))
        for name, fmt in zip(given, formats, strict=True)
    ]
    return tuple(sorted(choices, key=lambda choice: choice.bits))


def _format(name: str) -> Format | BlockFormat:
    base, plus, word = name.partition("+")
    fmt = find_format(base)
    if plus:
        up = with_scales_rounded_up(fmt)
        if word.strip().lower() != UP or up == fmt:
            raise BadInput(f"search(formats=...): {name!r}: only {UP!r} may follow a plus, for MX formats: 'mxfp8+up'.")
        fmt = up
    if fmt.name == "tf32":
        raise BadInput(
            "search(formats=...): TF32 is set for a whole device, not for a module. Here fp32 means FP32 without TF32."
        )
    if fmt.name not in REGIONS and _bits(fmt) > MOST_BITS:
        raise BadInput(
            f"search(formats=...): {fmt.name} is not used for training at speed; {WIDEST!r} is the widest here."
        )
    return fmt


def _bits(fmt: Format | BlockFormat) -> float:
    return fmt.bits_per_value if isinstance(fmt, BlockFormat) else fmt.bits


class _AsTheyAre(EmulationRecipe):
    """Keeps operands, in FP32, where a product of 16-bit values is exactly what 16-bit hardware computes."""

    __slots__ = ()

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool, is_weight: bool = False) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.float()


FP32 = find_format(WIDEST)
AS_THEY_ARE = _AsTheyAre(name=WIDEST, forward=FP32, backward=FP32, scaled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatArrangement:
    """Which format runs where: a region for the whole model, others for modules in it, and recipes for emulated ones.

    In an FP32 region everything is FP32: outputs of 16-bit modules there are widened. Disabled autocast casts nothing,
    so a product of two such outputs would otherwise be in 16 bits.
    """

    base: str
    regions: Mapping[Module, str]  # modules whose region differs from that of their parent
    recipes: Mapping[Module, EmulationRecipe | None]
    widened: tuple[Module, ...]

    @property
    def regions_used(self) -> frozenset[str]:
        """The regions in use, by name."""
        return frozenset((self.base, *self.regions.values()))

    @contextmanager
    def on(self, model: Module) -> Iterator[None]:
        """Run modules as arranged while inside; the caller applies autocast for ``base``."""
        with ExitStack() as stack:
            for module, region in self.regions.items():
                earlier = module.__dict__.get("forward")
                module.forward = wrap_forward(region, module)
                if earlier is None:
                    stack.callback(delattr, module, "forward")
                else:
                    stack.callback(setattr, module, "forward", earlier)
            for module in self.widened:
                hook = module.register_forward_hook(lambda module, args, output: cast_inputs(WIDEST, output))
                stack.callback(hook.remove)
            if self.recipes:
                stack.enter_context(emulated(model, self.recipes))
            yield


def arrange_formats(
    units: Sequence[SearchUnit], chosen: Sequence[FormatChoice], device: torch.device, *, base: str | None = None
) -> FormatArrangement:
    """Arrange one choice per unit; ``base`` overrides the region of the whole."""
    formats = {unit.name: choice for unit, choice in zip(units, chosen, strict=True)}
    if base is None and REST in formats:
        base = formats[REST].region
    elif base is None:  # what is in no unit runs in autocast, whose lists keep in FP32 what needs it
        base = next((choice.region for choice in formats.values() if choice.region != WIDEST), WIDEST)
    regions: dict[Module, str] = {}
    recipes: dict[Module, EmulationRecipe | None] = {}
    widened: list[Module] = []
    for unit in sorted(units, key=lambda unit: unit.name.count(".") + bool(unit.name)):  # outer ones first
        choice, around = formats[unit.name], [*name_and_parents(unit.name), REST][1:]  # modules that contain it
        enclosing = [formats[name] for name in around if name in formats]
        outer = enclosing[0].region if enclosing else base
        if unit.name and choice.region != outer:
            regions[unit.module] = choice.region
        if outer == WIDEST and choice.region != WIDEST and unit.name:
            widened.append(unit.module)
        if choice.recipe is not None:
            recipes[unit.module] = choice.recipe
        elif device.type == "cpu" and choice.region != WIDEST:
            # Most CPUs have no instructions for 16 bits, and take a hundred times as long.
            recipes[unit.module] = AS_THEY_ARE
        elif any(each.narrow for each in enclosing):
            recipes[unit.module] = None  # an outer recipe would otherwise apply here, too
    return FormatArrangement(base=base, regions=regions, recipes=recipes, widened=tuple(widened))
