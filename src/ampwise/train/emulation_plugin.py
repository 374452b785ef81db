"""``precision="emulate:…"``: matmuls on values rounded to a format, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module, ModuleList

from ampwise.numbers.emulation.emulated_matmuls import MatmulEmulation
from ampwise.numbers.emulation.recipe import EmulationRecipe
from ampwise.train.precision.policy import Policy, modules_with_wrappers, named_modules
from ampwise.train.precision_plugin import PrecisionPlugin

__all__ = ["EmulationPlugin", "make_emulation"]


class EmulationPlugin(PrecisionPlugin):
    """Emulates all matmuls of the models by one recipe, except in modules that the policy keeps."""

    def __init__(self, models: Sequence[Module], policy: Policy, recipe: EmulationRecipe) -> None:
        self._emulation = make_emulation(policy, recipe, models)

    def pass_context(self) -> AbstractContextManager[Any]:
        return self._emulation.on()


def make_emulation(policy: Policy, recipe: EmulationRecipe, models: Sequence[Module]) -> MatmulEmulation:
    """Return an emulation of all matmuls of the models by one recipe, except in the policy's kept modules."""
    whole = models[0] if len(models) == 1 else ModuleList(models)
    recipes: dict[Module, EmulationRecipe | None] = {}
    for model in models:  # also the modules inside DDP or torch.compile wrappers, which may be called directly
        recipes.update((module, recipe) for name, module in modules_with_wrappers(model) if not name)
    named = named_modules(whole)
    recipes.update((named[name], None) for name in policy.modules(whole))
    return MatmulEmulation(whole, recipes)
