"""The models of a training step, emulated but for the modules that a policy keeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module, ModuleList

from ampwise.emulation.products import Emulation
from ampwise.emulation.recipe import Recipe
from ampwise.engine.precision.policy import Policy, named_modules, with_wrappers

__all__ = ["emulation_by"]


def emulation_by(policy: Policy, recipe: Recipe, models: Sequence[Module]) -> Emulation:
    """All products of the models by one recipe; kept modules compute in what they are kept in."""
    whole = models[0] if len(models) == 1 else ModuleList(models)
    recipes: dict[Module, Recipe | None] = {}
    for model in models:  # and what DDP or torch.compile wraps, which may be called by itself
        recipes.update((module, recipe) for name, module in with_wrappers(model) if not name)
    named = named_modules(whole)
    recipes.update((named[name], None) for name in policy.modules(whole))
    return Emulation(whole, recipes)
