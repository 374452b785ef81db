"""Tensors without memory: they know their shape and type, and nothing else. All are on the CPU, whatever code says."""

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
    """Within, whatever is made is fake: a model of any size takes no memory, and its passes next to no time."""
    # Real tensors, from a file or from numpy, are taken for what they are: shapes.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        OnCpu(),
        replaced(torch.autocast, "__init__", _init_on_cpu(torch.autocast.__init__)),
        replaced(torch.utils, "swap_tensors", _set),
        replaced(FakeTensor, "__deepcopy__", _copied),
        replaced(logging.getLogger(FakeTensor.__module__), "disabled", True),  # of errors, which are raised too
    ):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, an attribute has another value; afterwards it has its own, or is gone as it was."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class OnCpu(TorchFunctionMode):
    """Code that names a GPU gets the CPU: there may be none here, and fake tensors of one cannot be trained without."""

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
    """A region of CUDA's autocast is one of the CPU's, where the tensors are."""

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, _on_cpu(device_type), *args, **kwargs)

    return on_cpu


def _set(old: Tensor, new: Tensor) -> None:
    """What ``Module.to`` does to a parameter: torch would swap the two, and refuses since fake ones are referred to."""
    old.data = new.data


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Torch's own deepcopy of a fake tensor has no storage to speak of: each of its views comes with another."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, Parameter)
        memo[id(tensor)] = Parameter(copy, tensor.requires_grad) if is_parameter else copy
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]
