"""``precision="emulate:…"``: products on values rounded to a format, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module, ModuleList

from ampwise.emulation.products import Emulation
from ampwise.emulation.recipe import Recipe
from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.policy import Policy, named_modules

__all__ = ["EmulatedFitting"]


class EmulatedFitting(Fitting):
    """All products of the models by one recipe, but for those of modules that the policy keeps."""

    def __init__(self, models: Sequence[Module], policy: Policy, recipe: Recipe) -> None:
        whole = models[0] if len(models) == 1 else ModuleList(models)
        recipes: dict[Module, Recipe | None] = dict.fromkeys(models, recipe)
        recipes.update(dict.fromkeys(_kept(whole, policy)))
        self._emulation = Emulation(whole, recipes)

    def products(self) -> AbstractContextManager[Any]:
        return self._emulation.on()


def _kept(model: Module, policy: Policy) -> list[Module]:
    named = named_modules(model)
    return [named[name] for name in policy.modules(model)]
