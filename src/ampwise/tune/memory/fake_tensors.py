"""Fake tensors, which have a shape and dtype but no memory. All are on the CPU, whatever device the code names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

__all__ = ["replaced", "without_memory"]


@contextmanager
def without_memory() -> Iterator[None]:
    """Make all tensors fake while inside: a model of any size takes no memory, and its passes almost no time."""
    # Real tensors, from a file or from numpy, count by their shapes.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        OnCpu(),
        replaced(torch.autocast, "__init__", _init_on_cpu(torch.autocast.__init__)),
        replaced(torch.utils, "swap_tensors", _set),
        replaced(FakeTensor, "__deepcopy__", _copied),
        replaced(logging.getLogger(FakeTensor.__module__), "disabled", True),  # errors are raised anyway
    ):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while inside; restore or delete it afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class OnCpu(TorchFunctionMode):
    """Replaces GPUs by the CPU: there may be no GPU, and its fake tensors cannot be trained without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is torch.device:
            return _on_cpu(func(*args, **(kwargs or {})))
        args = tuple(_on_cpu(value) for value in args)
        return func(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if value == "cuda" or value.startswith("cuda:") else value
    return value


def _init_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Make autocast for CUDA apply to the CPU, where the tensors are."""

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, _on_cpu(device_type), *args, **kwargs)

    return on_cpu


def _set(old: Tensor, new: Tensor) -> None:
    """Set a parameter's data, as ``Module.to`` does: torch would swap the two, and refuses for fake tensors."""
    old.data = new.data


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor: torch's own deepcopy gives each view another storage."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, Parameter)
        memo[id(tensor)] = Parameter(copy, tensor.requires_grad) if is_parameter else copy
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]
