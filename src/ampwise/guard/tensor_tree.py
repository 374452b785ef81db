"""Split nested data into named tensors and a plain skeleton that refers to them, and join the two again."""

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
from ampwise.guard.storage_dtypes import as_stored, dtype_from_name, from_stored, original_dtype_name

__all__ = ["join_tensors", "split_tensors"]

MARK = "ampwise tensor"  # key of a dict that stands for a tensor: its name and how to restore it
ESCAPED = "ampwise literal"  # key of a dict that wraps a user's dict which has one of these keys itself
LONGEST_PATH = 1000
DICTS = (dict, OrderedDict, defaultdict, Counter)


def split_tensors(value: Any, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors, under names that begin with the prefix, and a copy of the data with marks in their place.

    >>> import torch
    >>> split_tensors({"shadow": [torch.ones(1)], "decay": 0.9}, "ema")
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
        raise BadInput(f"{prefix or 'the state'} is nested too deep, or contains itself.") from None


def join_tensors(value: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """Put the tensors back where ``split`` left marks."""

    def join_item(item: Any, *, literal: bool = False) -> Any:
        if type(item) is dict and not literal:
            if MARK in item:
                return _marked(item, tensors, prefix)
            if ESCAPED in item:
                return join_item(item[ESCAPED], literal=True)
        return _rebuilt(item, lambda inner, _: join_item(inner), escape=False)

    return join_item(value)


def _rebuilt(value: Any, each: Callable[[Any, str], Any], *, escape: bool) -> Any:
    """Copy a container, with ``each`` applied to its items."""
    kind = type(value)
    if kind in DICTS:
        alike = copy.copy(value)  # keeps a defaultdict's factory
        dict.update(
            alike, {key: each(inner, _segment(key)) for key, inner in value.items()}
        )  # Counter.update would add
        return {ESCAPED: alike} if escape and (MARK in value or ESCAPED in value) else alike
    if kind in (list, tuple):
        return kind(each(inner, str(number)) for number, inner in enumerate(value))
    if kind is deque:
        return deque((each(inner, str(number)) for number, inner in enumerate(value)), value.maxlen)
    try:
        return copy.deepcopy(value)
    except Exception as error:  # anything: a lock, for example, cannot be copied
        raise BadInput(
            f"a {kind.__name__} cannot be saved: {str(error)[:200]}. Leave it out of state_dict()."
        ) from error


def _segment(key: Any) -> str:
    """Encode a dict key as a path segment; different keys get different segments."""
    if type(key) is str:
        return key.replace("~", "~0").replace("/", "~1")
    return f"~{type(key).__name__}:{key!r}".replace("/", "~1")


def _name(path: str) -> str:
    """Return a name that is valid in a file: printable, and not too long."""
    if path and path.isprintable() and len(path) <= LONGEST_PATH and not path.startswith("~#"):
        return path
    return "~#" + hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()


def _facts(tensor: Tensor, name: str) -> dict[str, Any]:
    if type(tensor) not in (Tensor, Parameter) and not hasattr(tensor, "_local_tensor"):
        kind = type(tensor).__name__
        raise BadInput(
            f"{name} is a {kind}, which would be restored as a plain tensor. Save a plain one: .as_subclass(Tensor)."
        )
    viewed = original_dtype_name(tensor)
    return {
        "on": tensor.device.type,
        **({} if viewed is None else {"dtype": viewed}),
        **({"requires_grad": True} if tensor.requires_grad else {}),
        **({"parameter": True} if type(tensor) is Parameter else {}),
    }


def _marked(mark: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    name = f"{prefix}.{mark[MARK]}"
    if name not in tensors:
        raise BadInput(f"the state does not have the tensor {name[:80]}.")
    dtype = dtype_from_name(mark["dtype"]) if "dtype" in mark else None
    tensor = from_stored(tensors[name].to(_device_here(mark.get("on")), copy=True), dtype)
    if "parameter" in mark:
        return Parameter(tensor, requires_grad="requires_grad" in mark)
    return tensor.requires_grad_() if "requires_grad" in mark else tensor


def _device_here(device: Any) -> str:
    """Return the device a tensor was saved from, if this machine has one of that type; else the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here.type if here is not None and here.type == device else "cpu"
