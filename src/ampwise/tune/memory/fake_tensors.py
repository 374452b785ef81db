"""Fake tensors, which have a shape and dtype but no memory. All are on the CPU, whatever device the code names.

Numbers that code uses while the model and its batch are made are real: many models set the rates of their layers by
``[rate.item() for rate in torch.linspace(0, 0.1, depth)]``. Such numbers begin with a range, a list or whole numbers,
are few, and are not weights: they are computed, and weights are not. In the step, numbers that come from such ones have
values beside their fake tensor, so that ``mask.all()`` and ``torch.rand([]) < rate`` work as in training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

RANGES = frozenset({"aten::arange", "aten::linspace", "aten::logspace", "aten::randperm"})
FEW = 2**20  # elements
NEW_PARAMETER = Parameter.__new__
VALUES_OF = 2**22  # elements at most that have values in the step: a mask of 2,048 × 2,048


@contextmanager
def without_memory() -> Iterator[None]:
    """Make all tensors fake while inside: a model of any size takes no memory, and its passes almost no time."""
    init = torch.autocast.__init__

    def init_on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        """Make autocast for CUDA apply to the CPU, where the tensors are."""
        init(self, _on_cpu(device_type), *args, **kwargs)

    def set_data(old: Tensor, new: Tensor) -> None:
        """Set a parameter's data, as ``Module.to`` does: torch would swap the two, and refuses for fake tensors."""
        old.data = new.data

    # Real tensors, from a file or from numpy, count by their shapes.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        OnCpu(),
        _replaced(torch.autocast, "__init__", init_on_cpu),
        _replaced(torch.utils, "swap_tensors", set_data),
        _replaced(FakeTensor, "__deepcopy__", _copied),
        _replaced(logging.getLogger(FakeTensor.__module__), "disabled", True),  # errors are raised anyway
        # Code that asks whether it is being traced, as transformers does, takes other paths than in training.
        _replaced(torch._subclasses, "FakeTensor", NotTraced),
        _replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", VALUES_OF),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while inside; restore or delete it afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class NotTraced:
    """Stands for the class of fake tensors; none is an instance."""


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


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor: torch's own deepcopy gives each view another storage."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, Parameter)
        memo[id(tensor)] = Parameter(copy, tensor.requires_grad) if is_parameter else copy
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]


@contextmanager
def real_values() -> Iterator[None]:
    """Give ranges, lists and what is computed from them real values while inside. Weights have none."""
    # Torch's truncated normal redraws until no value is outside, and so reads values: skip it.
    with (
        RealNumbers(),
        _replaced(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
        _replaced(Parameter, "__new__", staticmethod(_without_values)),
    ):
        yield


def _without_values(kind: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
    """Make a parameter, fake also where its data is real, as that of ``Parameter(torch.tensor(2.6))``."""
    mode = torch._guards.detect_fake_mode()
    if mode is not None and isinstance(data, Tensor) and not isinstance(data, FakeTensor):
        data = mode.fake_tensor_converter.from_real_tensor(mode, data)
    return NEW_PARAMETER(kind, data, requires_grad)


class RealNumbers(TorchDispatchMode):
    """Runs operations without fake inputs for real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if not tensors:
            fake = func(*args, **kwargs)
            if not (isinstance(fake, Tensor) and fake.numel() <= FEW and _is_counted(func, fake)):
                return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_counted(func: Any, made: Tensor) -> bool:
    """Whether these are numbers that code may decide by: whole ones, marks, ranges."""
    return not (made.is_floating_point() or made.is_complex()) or func._schema.name in RANGES


class KnownValues(TorchDispatchMode):
    """Gives tensors that are made without others their values, where these are few; torch's fake tensors pass them on.

    The values of weights are not known, nor is anything that is computed from them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if leaves:
            if any(not isinstance(leaf, FakeTensor) for leaf in leaves):
                args, kwargs = tree_map(known, (args, kwargs))
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if not isinstance(made, FakeTensor) or made.numel() > VALUES_OF or func._schema.name.startswith("aten::empty"):
            return made
        if made.ndim and made.is_floating_point() and torch.Tag.nondeterministic_seeded in func.tags:
            return made  # noise
        with unset_fake_temporarily():
            real = func(*args, **kwargs)
        return known(real, made)


def known(value: Any, like: FakeTensor | None = None) -> Any:
    """Return a real tensor as a fake one with its values; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.requires_grad:
        return value
    mode = like.fake_mode if like is not None else torch._guards.detect_fake_mode()
    if mode is None or value.numel() > VALUES_OF:
        return value
    return mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True)
