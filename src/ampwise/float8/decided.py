"""What was decided for the layers of models that are being trained: for whoever describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ampwise.float8.choosing import AS_NO_LAYER, BY_TORCHAO, WIDE, Choice, choices
from ampwise.float8.prepared import is_prepared, is_wide
from ampwise.float8.recipe import Fp8

__all__ = ["decided_on", "described", "forget", "put_there_before"]

_DECIDED: WeakKeyDictionary[nn.Module, Choice] = WeakKeyDictionary()


def decided_on(found: Mapping[Any, Choice]) -> None:
    """Remember what runs how."""
    _DECIDED.update(found)


def forget(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        _DECIDED.pop(module, None)


def described(model: nn.Module, kept: Mapping[nn.Module, str]) -> dict[nn.Module, tuple[str, str]]:
    """Of each module with parameters of its own: its precision, and why. As it is run, or else would be by default."""
    found = choices(model, kept, Fp8())
    found.update({module: _DECIDED[module] for module in found if module in _DECIDED})
    layers: dict[nn.Module, tuple[str, str]] = {
        module: (choice.precision, choice.why) for module, choice in found.items()
    }
    return {module: layers.get(module, (WIDE, AS_NO_LAYER)) for module in model.modules()}


def put_there_before(model: nn.Module) -> dict[nn.Module, tuple[str, str]]:
    """Layers of torchao's, which run in FP8 whatever the precision around them is; described as above."""
    return {each: ("fp8", BY_TORCHAO) for each in model.modules() if is_prepared(each) and not is_wide(each)}
