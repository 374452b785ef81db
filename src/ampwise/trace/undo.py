"""Restore memory that a replay overwrites.

Memory is copied only when an operation is about to write to it: running statistics, a batch that is changed in place,
gradients that are accumulated. Memory that the replay itself allocates is not copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ampwise.trace.value_ranges import has_storage, local_shard

__all__ = ["UndoLog", "overwrite", "written_arguments"]

# Arguments that operations write to although their schema does not say so.
UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})


@lru_cache(maxsize=4096)
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operation writes to."""
    schema = func._schema
    quiet = "batch_norm" in schema.name and "backward" not in schema.name
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (quiet and argument.name in UNDECLARED_WRITES)
    )


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor without bumping its version: autograd would reject a saved tensor that changed."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
        tensor.copy_(values)


class UndoLog:
    """Copies of the memory that was overwritten, in order."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor, _unsafe_preserve_version_counter]] = []
        self._known: set[object] = set()

    def before_write(self, tensor: Tensor) -> None:
        """Copy a tensor that an operation is about to overwrite."""
        inner = local_shard(tensor)
        if not has_storage(inner):
            return
        key = (id(inner), *((inner.data_ptr(), inner.shape, inner.stride()) if inner.layout == torch.strided else ()))
        if key not in self._known:
            self._known.add(key)
            # It may be saved for another backward pass, which would reject a tensor that changed.
            self._copies.append((inner, inner.detach().clone(), _unsafe_preserve_version_counter(inner)))

    def put_back(self) -> None:
        """Restore all copies, the latest first."""
        for tensor, copy, version in reversed(self._copies):
            with torch.no_grad(), version:
                if has_storage(tensor):
                    tensor.copy_(copy)
        self._copies.clear()
        self._known.clear()
