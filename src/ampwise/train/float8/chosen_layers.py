"""The choices for the layers of models in training, for ``Policy.describe``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ampwise.train.float8.layer_choice import (
    NOT_LINEAR,
    OTHER_PRECISION,
    TORCHAO_LAYER_REASON,
    LayerChoice,
    choose_layers,
)
from ampwise.train.float8.prepared_layers import is_prepared, uses_linear_forward
from ampwise.train.float8.recipe import Fp8

__all__ = ["describe_layers", "forget_choices", "remember_choices", "torchao_layers"]

_DECIDED: WeakKeyDictionary[nn.Module, LayerChoice] = WeakKeyDictionary()


def remember_choices(found: Mapping[Any, LayerChoice]) -> None:
    """Remember the choices of these layers."""
    _DECIDED.update(found)


def forget_choices(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        _DECIDED.pop(module, None)


def describe_layers(model: nn.Module, kept: Mapping[nn.Module, str]) -> dict[nn.Module, tuple[str, str]]:
    """Return precision and reason of each module: as it runs now, or else as the default recipe would choose."""
    found = choose_layers(model, kept, Fp8())
    found.update({module: _DECIDED[module] for module in found if module in _DECIDED})
    layers: dict[nn.Module, tuple[str, str]] = {
        module: (choice.precision, choice.why) for module, choice in found.items()
    }
    return {module: layers.get(module, (OTHER_PRECISION, NOT_LINEAR)) for module in model.modules()}


def torchao_layers(model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
    """Return precision and reason of torchao's layers, which run in FP8 in any precision."""
    return {
        each: ("fp8", TORCHAO_LAYER_REASON)
        for each in model.modules()
        if is_prepared(each) and not uses_linear_forward(each)
    }
