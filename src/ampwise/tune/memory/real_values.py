"""Compute real values for the numbers a model's code uses while the model is made of fake tensors.

Many models set the rates of their layers by ``[rate.item() for rate in torch.linspace(0, 0.1, depth)]``. Such numbers
begin with a range or a list, are few, and are not weights: they are computed, and weights are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampwise.tune.memory.fake_tensors import replaced

__all__ = ["real_values"]

# A DataLoader shuffles by a permutation, and its seed is a single number.
RANGES = frozenset({"aten::arange", "aten::linspace", "aten::logspace", "aten::randperm"})
FEW = 2**20  # elements


@contextmanager
def real_values() -> Iterator[None]:
    """Give ranges, lists and what is computed from them real values while inside. Weights have none."""
    with RealNumbers(), replaced(torch.nn.init, "_no_grad_trunc_normal_", _left):
        yield


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
            if not (_is_whole_number(fake) or (func._schema.name in RANGES and fake.numel() <= FEW)):
                return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_whole_number(made: Any) -> bool:
    return isinstance(made, Tensor) and not made.ndim and made.dtype == torch.int64


def _left(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Skip torch's truncated normal, which redraws until no value is outside, and so reads values."""
    return tensor
