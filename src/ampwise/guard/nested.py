"""Nested data apart: the tensors in it by name, and what is left, in which each has a mark."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput

__all__ = ["join", "split"]

MARK, DEVICE = "ampwise tensor", "on"


@dataclass(slots=True)
class _Place:
    tensors: dict[str, Tensor]
    prefix: str


def split(value: Any, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Tensors under names that begin with the prefix, and the rest, copied.

    >>> import torch
    >>> split({"shadow": [torch.ones(1)], "decay": 0.9}, "ema")
    ({'ema.shadow.0': tensor([1.])}, {'shadow': [{'ampwise tensor': 'shadow.0', 'on': 'cpu'}], 'decay': 0.9})
    """
    place = _Place({}, prefix)
    return place.tensors, _split(value, "", place)


def _split(value: Any, path: str, place: _Place) -> Any:
    if isinstance(value, Tensor):
        name = path.lstrip(".") or "value"
        place.tensors[f"{place.prefix}.{name}"] = value.detach()
        return {MARK: name, DEVICE: value.device.type}
    if isinstance(value, Mapping):
        inner = {key: _split(each, f"{path}.{key}", place) for key, each in value.items()}
        return inner if type(value) is dict else _of_kind(value, inner)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_split(each, f"{path}.{number}", place) for number, each in enumerate(value)))
    if isinstance(value, list | tuple):
        return type(value)(_split(each, f"{path}.{number}", place) for number, each in enumerate(value))
    return copy.deepcopy(value)


def join(value: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """The way back."""
    if isinstance(value, Mapping):
        if MARK in value:
            name = f"{prefix}.{value[MARK]}"
            if name not in tensors:
                raise BadInput(f"the state is without the tensor {name[:80]}.")
            return tensors[name].to(_device_here(value.get(DEVICE)), copy=True)
        inner = {key: join(each, tensors, prefix) for key, each in value.items()}
        return inner if type(value) is dict else _of_kind(value, inner)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(join(each, tensors, prefix) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(join(each, tensors, prefix) for each in value)
    return copy.deepcopy(value)


def _device_here(device: Any) -> str:
    """Where a tensor was, if this machine has such a device."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here.type if here is not None and here.type == device else "cpu"


def _of_kind(value: Mapping[Any, Any], inner: dict[Any, Any]) -> Any:
    """The same class of dict: a Counter, an OrderedDict."""
    if not isinstance(value, dict):
        return inner
    alike = copy.copy(value)
    dict.update(alike, inner)  # not a Counter's own, which would add
    return alike
