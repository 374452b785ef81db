"""``precision="emulate:…"``: products on values rounded to a format, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module

from ampwise.emulation.by_policy import emulation_by
from ampwise.emulation.recipe import Recipe
from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.policy import Policy

__all__ = ["EmulatedFitting"]


class EmulatedFitting(Fitting):
    """All products of the models by one recipe, but for those of modules that the policy keeps."""

    def __init__(self, models: Sequence[Module], policy: Policy, recipe: Recipe) -> None:
        self._emulation = emulation_by(policy, recipe, models)

    def products(self) -> AbstractContextManager[Any]:
        return self._emulation.on()
