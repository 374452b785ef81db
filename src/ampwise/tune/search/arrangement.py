"""Apply formats to the modules of a model, and remove them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.numbers.emulation.emulated_matmuls import emulated
from ampwise.numbers.emulation.recipe import EmulationRecipe
from ampwise.numbers.formats import find_format
from ampwise.train.precision.call_in_precision import cast_inputs, wrap_forward
from ampwise.tune.search.format_choices import WIDEST, FormatChoice
from ampwise.tune.search.units import REST, SearchUnit

__all__ = ["FormatArrangement", "arrange_formats", "widening"]


class _AsTheyAre(EmulationRecipe):
    """Keeps operands, in FP32, where a product of 16-bit values is exactly what 16-bit hardware computes."""

    __slots__ = ()

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool) -> Tensor:
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
                _apply_region(stack, module, region)
            stack.enter_context(widening(self.widened))
            if self.recipes:
                stack.enter_context(emulated(model, self.recipes))
            yield


def arrange_formats(
    units: Sequence[SearchUnit], chosen: Sequence[FormatChoice], device: torch.device, *, base: str | None = None
) -> FormatArrangement:
    """Arrange one choice per unit; ``base`` overrides the region of the whole."""
    formats = {unit.name: choice for unit, choice in zip(units, chosen, strict=True)}
    base = base or _base(formats)
    regions: dict[Module, str] = {}
    recipes: dict[Module, EmulationRecipe | None] = {}
    widened: list[Module] = []
    by_name: dict[str, str] = {}  # the region of each unit
    for unit in sorted(units, key=lambda unit: unit.name.count(".") + bool(unit.name)):  # outer ones first
        choice, innermost = formats[unit.name], _innermost(unit.name, by_name)
        outer = base if innermost is None else by_name[innermost]
        by_name[unit.name] = choice.region
        if unit.name and choice.region != outer:
            regions[unit.module] = choice.region
        if outer == WIDEST and choice.region != WIDEST and unit.name:
            widened.append(unit.module)
        if choice.recipe is not None:
            recipes[unit.module] = choice.recipe
        elif _computed_in_fp32(choice, device):
            recipes[unit.module] = AS_THEY_ARE
        elif any(formats[name].narrow for name in _enclosing(unit.name, by_name)):
            recipes[unit.module] = None  # an outer recipe would otherwise apply here, too
    return FormatArrangement(base=base, regions=regions, recipes=recipes, widened=tuple(widened))


@contextmanager
def widening(modules: Iterable[Module]) -> Iterator[None]:
    """Make these modules return FP32 while inside, where they would return fewer bits."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(_widen).remove)
        yield


def _widen(module: Module, args: Any, output: Any) -> Any:
    return cast_inputs(WIDEST, output)


def _apply_region(stack: ExitStack, module: Module, region: str) -> None:
    earlier = module.__dict__.get("forward")
    module.forward = wrap_forward(region, module)

    def remove() -> None:
        del module.forward
        if earlier is not None:
            module.forward = earlier

    stack.callback(remove)


def _computed_in_fp32(choice: FormatChoice, device: torch.device) -> bool:
    """Whether to compute 16 bits in FP32: most CPUs have no instructions for them, and take a hundred times as long."""
    return device.type == "cpu" and choice.region != WIDEST


def _base(formats: Mapping[str, FormatChoice]) -> str:
    """Return the region of what is in no unit; else autocast's, whose lists keep in FP32 what needs it."""
    if REST in formats:
        return formats[REST].region
    return next((choice.region for choice in formats.values() if choice.region != WIDEST), WIDEST)


def _enclosing(name: str, known: Iterable[str]) -> Iterator[str]:
    """Yield the units that contain a module, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            yield name


def _innermost(name: str, known: Iterable[str]) -> str | None:
    return next(_enclosing(name, known), None)
