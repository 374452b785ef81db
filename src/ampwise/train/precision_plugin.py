"""What a precision needs besides autocast: changes to the model, or contexts for passes and for optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from ampwise.finding import Finding
from ampwise.numbers.emulation.emulated_matmuls import MatmulEmulation
from ampwise.numbers.emulation.recipe import BF16, EmulationRecipe
from ampwise.train.float8.recipe import Fp8
from ampwise.train.precision.contexts import NO_CONTEXT
from ampwise.train.precision.kept_layers import kept_layers
from ampwise.train.precision.policy import Policy, modules_with_wrappers, named_modules
from ampwise.train.precision.precision import TrainPrecision

__all__ = ["EmulationPlugin", "PrecisionPlugin", "make_emulation", "make_plugin"]


class PrecisionPlugin:
    """Base class, which does nothing: enough for FP32, TF32, FP16 and BF16. Other precisions have a subclass each.

    The constructor changes nothing; ``install`` does, and is called after all arguments are checked.
    """

    graph_version = 0  # increases when passes change what they do: CUDA graphs are then captured again
    bypass_graphs = False  # for now, run passes eagerly and not in a CUDA graph

    @property
    def locked_because(self) -> str:
        """Why ``uninstall`` is not possible, and what to do; empty if it is."""
        return ""

    def install(self) -> None:
        """Change model and optimizers as the precision needs."""

    def uninstall(self) -> None:
        """Undo ``install``, before another precision is installed."""

    def pass_context(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and backward pass; a new one for each pass."""
        return NO_CONTEXT

    def micro_batch_context(self, *, first: bool) -> AbstractContextManager[Any]:
        """Return the context around a pass of a step that has several, outside of CUDA graphs. first: of the step."""
        return NO_CONTEXT

    def step_context(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return the context for an optimizer's step."""
        return NO_CONTEXT

    def step_ended(self) -> None:
        """Called after each step, taken or skipped. Must not sync with the device."""

    def findings(self) -> list[Finding]:
        """Return findings about precision lost in training; may sync with the device."""
        return []

    def state(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned; if it does not fit, raise BadInput and change nothing."""


def make_plugin(
    precision: TrainPrecision,
    policy: Policy,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    fp8: Fp8 | None = None,
    *,
    graphed: bool = False,
) -> PrecisionPlugin:
    """Return the plugin of a precision for these models and optimizers, not yet installed; raise if it cannot work.

    fp8: how FP8 layers are scaled, for that precision. graphed: passes will be replayed by CUDA graphs.
    """
    if precision.recipe is not None:
        return EmulationPlugin(models, policy, precision.recipe)
    if precision.pure is not None:
        from ampwise.train.pure_bf16_plugin import PureBf16Plugin  # rarely needed, like the next, and imports this

        return PureBf16Plugin(models, policy, optimizers, precision.pure)
    if precision.name == "fp8":
        from ampwise.train.fp8_plugin import Fp8Plugin

        return Fp8Plugin(models, policy, fp8, device, graphed=graphed)
    return PrecisionPlugin()


class EmulationPlugin(PrecisionPlugin):
    """``precision="emulate:…"``: matmuls on values rounded to a format, on any device, except in kept modules."""

    def __init__(self, models: Sequence[Module], policy: Policy, recipe: EmulationRecipe) -> None:
        self._emulation = make_emulation(policy, recipe, models)

    def pass_context(self) -> AbstractContextManager[Any]:
        return self._emulation.on()


def make_emulation(policy: Policy, recipe: EmulationRecipe, models: Sequence[Module]) -> MatmulEmulation:
    """Return an emulation of all matmuls of the models by one recipe, except in the policy's kept modules.

    A pretraining recipe also leaves layers in BF16, unless the policy decides about them or a module around them.
    """
    whole = models[0] if len(models) == 1 else ModuleList(models)
    recipes: dict[Module, EmulationRecipe | None] = {}
    for model in models:  # also the modules inside DDP or torch.compile wrappers, which may be called directly
        recipes.update((module, recipe) for name, module in modules_with_wrappers(model) if not name)
    named = named_modules(whole)
    by_policy = [named[name] for name in policy.modules(whole)]
    if recipe.pretraining:
        decided = {inner for module in by_policy for inner in module.modules()}
        sensitive = (module for model in models for module in kept_layers(model))
        recipes.update((module, BF16) for module in sensitive if module not in decided)
    recipes.update((module, None) for module in by_policy)
    return MatmulEmulation(whole, recipes)
