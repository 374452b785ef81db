"""Nested data apart: the tensors in it by name, and what is left, in which each has a mark."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampwise.errors import BadInput
from ampwise.guard.stored import as_stored, dtype_called, from_stored, name_if_viewed

__all__ = ["join", "split"]

MARK = "ampwise tensor"  # the key of a dict that stands for a tensor: its name, and what to make of it
LITERAL = "ampwise literal"  # of one that stands for a dict which has one of these keys itself
LONGEST_PATH = 1000
DICTS = (dict, OrderedDict, defaultdict, Counter)


def split(value: Any, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Tensors under names that begin with the prefix, and the rest, copied.

    >>> import torch
    >>> split({"shadow": [torch.ones(1)], "decay": 0.9}, "ema")
    ({'ema.shadow/0': tensor([1.])}, {'shadow': [{'ampwise tensor': 'shadow/0', 'on': 'cpu'}], 'decay': 0.9})
    """
    tensors: dict[str, Tensor] = {}

    def mark(tensor: Tensor, path: str) -> dict[str, Any]:
        name = _name(path)
        full = f"{prefix}.{name}"
        if full in tensors:
            raise BadInput(f"two tensors of {prefix or 'the state'} are both called {path[:80]!r}: rename a key.")
        facts = _facts(tensor, full)
        tensors[full] = as_stored(tensor.detach(), full)
        return {MARK: name, **facts}

    def split_item(item: Any, path: str) -> Any:
        if isinstance(item, Tensor):
            return mark(item, path)
        return _rebuilt(item, lambda inner, key: split_item(inner, f"{path}/{key}" if path else key), escape=True)

    try:
        return tensors, split_item(value, "")
    except RecursionError:
        raise BadInput(f"{prefix or 'the state'} is nested too deep, or holds itself.") from None


def join(value: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """The way back."""

    def join_item(item: Any, *, literal: bool = False) -> Any:
        if type(item) is dict and not literal:
            if MARK in item:
                return _marked(item, tensors, prefix)
            if LITERAL in item:
                return join_item(item[LITERAL], literal=True)
        return _rebuilt(item, lambda inner, _: join_item(inner), escape=False)

    return join_item(value)


def _rebuilt(value: Any, each: Callable[[Any, str], Any], *, escape: bool) -> Any:
    """A copy of the same kind with ``each`` applied to what is in it."""
    kind = type(value)
    if kind in DICTS:
        alike = copy.copy(value)  # with a defaultdict's factory
        dict.update(alike, {key: each(inner, _segment(key)) for key, inner in value.items()})  # a Counter's would add
        return {LITERAL: alike} if escape and (MARK in value or LITERAL in value) else alike
    if kind in (list, tuple):
        return kind(each(inner, str(number)) for number, inner in enumerate(value))
    if kind is deque:
        return deque((each(inner, str(number)) for number, inner in enumerate(value)), value.maxlen)
    try:
        return copy.deepcopy(value)
    except Exception as error:  # of any kind, such as that a lock cannot be copied
        raise BadInput(
            f"a {kind.__name__} cannot be saved: {str(error)[:200]}. Leave it out of state_dict()."
        ) from error


def _segment(key: Any) -> str:
    """A key as a part of a path, such that different keys of a dict have different ones."""
    if type(key) is str:
        return key.replace("~", "~0").replace("/", "~1")
    return f"~{type(key).__name__}:{key!r}".replace("/", "~1")


def _name(path: str) -> str:
    """A name that a file takes: printable, and not too long."""
    if path and path.isprintable() and len(path) <= LONGEST_PATH and not path.startswith("~#"):
        return path
    return "~#" + hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()


def _facts(tensor: Tensor, name: str) -> dict[str, Any]:
    if type(tensor) not in (Tensor, Parameter) and not hasattr(tensor, "_local_tensor"):
        kind = type(tensor).__name__
        raise BadInput(f"{name} is a {kind}, which would come back as a plain tensor. Save one: .as_subclass(Tensor).")
    viewed = name_if_viewed(tensor)
    return {
        "on": tensor.device.type,
        **({} if viewed is None else {"dtype": viewed}),
        **({"requires_grad": True} if tensor.requires_grad else {}),
        **({"parameter": True} if type(tensor) is Parameter else {}),
    }


def _marked(mark: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    name = f"{prefix}.{mark[MARK]}"
    if name not in tensors:
        raise BadInput(f"the state is without the tensor {name[:80]}.")
    dtype = dtype_called(mark["dtype"]) if "dtype" in mark else None
    tensor = from_stored(tensors[name].to(_device_here(mark.get("on")), copy=True), dtype)
    if "parameter" in mark:
        return Parameter(tensor, requires_grad="requires_grad" in mark)
    return tensor.requires_grad_() if "requires_grad" in mark else tensor


def _device_here(device: Any) -> str:
    """Where a tensor was, if this machine has such a device."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here.type if here is not None and here.type == device else "cpu"
