"""While a model is made of fake tensors, what its code computes to decide with is real.

``[rate.item() for rate in torch.linspace(0, 0.1, depth)]`` is how many models set the rates of their layers. Such
numbers begin with a range or a list, are few, and belong to no weight: they are computed, and weights are not.
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

from ampwise.tune.memory.fake import replaced

__all__ = ["making"]

# A permutation is how a DataLoader shuffles, by a seed that is a number by itself.
RANGES = frozenset({"aten::arange", "aten::linspace", "aten::logspace", "aten::randperm"})
FEW = 2**20  # elements


@contextmanager
def making() -> Iterator[None]:
    """Within, ranges, lists and what is computed of them have values. Those of weights are nobody's concern."""
    with RealNumbers(), replaced(torch.nn.init, "_no_grad_trunc_normal_", _left):
        yield


class RealNumbers(TorchDispatchMode):
    """Runs for real what has none but real inputs."""

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
    """Torch's own draws again until no value is outside, for which it has to look at values."""
    return tensor
