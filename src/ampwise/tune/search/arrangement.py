"""Formats put on the modules of a model, and taken off again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.emulation.products import emulated
from ampwise.emulation.recipe import Recipe
from ampwise.engine.precision.region import forward_in, inputs_for
from ampwise.formats import find_format
from ampwise.tune.search.choices import WIDEST, Choice
from ampwise.tune.search.units import REST, Unit

__all__ = ["Arrangement", "arrangement_of", "widening"]


class _AsTheyAre(Recipe):
    """Operands as they come, in FP32, in which a product of 16-bit values is what 16-bit hardware gives."""

    __slots__ = ()

    def of(self, tensor: Tensor, dim: int, *, is_gradient: bool) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.float()


FP32 = find_format(WIDEST)
AS_THEY_ARE = _AsTheyAre(name=WIDEST, forward=FP32, backward=FP32, scaled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """What runs how: a region for the whole, others for modules in it, and recipes for those that are emulated.

    In a region of FP32 all is FP32: what modules of 16 bits return there is widened. Autocast that is off casts
    nothing, and a product of what two such modules return would have 16 bits.
    """

    base: str
    regions: Mapping[Module, str]  # of modules that have another one than what is around them
    recipes: Mapping[Module, Recipe | None]
    widened: tuple[Module, ...]

    @property
    def regions_used(self) -> frozenset[str]:
        """By name."""
        return frozenset((self.base, *self.regions.values()))

    @contextmanager
    def on(self, model: Module) -> Iterator[None]:
        """While inside, modules run as arranged; the base is for autocast around the model."""
        with ExitStack() as stack:
            for module, region in self.regions.items():
                _put_on(stack, module, region)
            stack.enter_context(widening(self.widened))
            if self.recipes:
                stack.enter_context(emulated(model, self.recipes))
            yield


def arrangement_of(
    units: Sequence[Unit], chosen: Sequence[Choice], device: torch.device, *, base: str | None = None
) -> Arrangement:
    """For units that have these formats, a choice each; ``base`` where it does not follow from these."""
    formats = {unit.name: choice for unit, choice in zip(units, chosen, strict=True)}
    base = base or _base(formats)
    regions: dict[Module, str] = {}
    recipes: dict[Module, Recipe | None] = {}
    widened: list[Module] = []
    by_name: dict[str, str] = {}  # the region of each unit
    for unit in sorted(units, key=lambda unit: unit.name.count(".") + bool(unit.name)):  # outer ones first
        choice, above = formats[unit.name], _above(unit.name, by_name)
        around = base if above is None else by_name[above]
        by_name[unit.name] = choice.region
        if unit.name and choice.region != around:
            regions[unit.module] = choice.region
        if around == WIDEST and choice.region != WIDEST and unit.name:
            widened.append(unit.module)
        if choice.recipe is not None:
            recipes[unit.module] = choice.recipe
        elif _computed_in_fp32(choice, device):
            recipes[unit.module] = AS_THEY_ARE
        elif any(formats[name].narrow for name in _around(unit.name, by_name)):
            recipes[unit.module] = None  # a recipe counts for all that is inside, unless that has its own
    return Arrangement(base=base, regions=regions, recipes=recipes, widened=tuple(widened))


@contextmanager
def widening(modules: Iterable[Module]) -> Iterator[None]:
    """While inside, these modules return FP32 where they would return fewer bits."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(_widen).remove)
        yield


def _widen(module: Module, args: Any, output: Any) -> Any:
    return inputs_for(WIDEST, output)


def _put_on(stack: ExitStack, module: Module, region: str) -> None:
    earlier = module.__dict__.get("forward")
    module.forward = forward_in(region, module)

    def take_off() -> None:
        del module.forward
        if earlier is not None:
            module.forward = earlier

    stack.callback(take_off)


def _computed_in_fp32(choice: Choice, device: torch.device) -> bool:
    """Most CPUs have no instructions for 16 bits, and take a hundred times as long as for FP32."""
    return device.type == "cpu" and choice.region != WIDEST


def _base(formats: Mapping[str, Choice]) -> str:
    """That of what is in no other unit; else autocast, whose lists keep in FP32 what has to be."""
    if REST in formats:
        return formats[REST].region
    return next((choice.region for choice in formats.values() if choice.region != WIDEST), WIDEST)


def _around(name: str, known: Iterable[str]) -> Iterator[str]:
    """The units around a module, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            yield name


def _above(name: str, known: Iterable[str]) -> str | None:
    return next(_around(name, known), None)
