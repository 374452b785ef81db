"""Memory that was there before and is written to, put back as it was.

A copy is made when an operation is about to write, and only then: of running statistics, a batch that is changed in
place, gradients that are added to. What a replay makes itself is nobody's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ampwise.trace.ranges import has_memory, local

__all__ = ["Undo", "overwrite", "written_arguments"]

# Arguments that operations write to though their schema does not say so.
UNSAID = frozenset({"running_mean", "running_var"})


@lru_cache(maxsize=4096)
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    schema = func._schema
    quiet = "batch_norm" in schema.name and "backward" not in schema.name
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or (quiet and argument.name in UNSAID)
    )


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Put values into a tensor such that nobody who has it saved for a backward pass takes it for a mistake."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
        tensor.copy_(values)


class Undo:
    """Copies of what was written to, the latest last."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor, _unsafe_preserve_version_counter]] = []
        self._known: set[object] = set()

    def before_write(self, tensor: Tensor) -> None:
        inner = local(tensor)
        if not has_memory(inner):
            return
        key = (id(inner), *((inner.data_ptr(), inner.shape, inner.stride()) if inner.layout == torch.strided else ()))
        if key not in self._known:
            self._known.add(key)
            # Someone may have it saved for a backward pass of theirs, and would take the write for a mistake.
            self._copies.append((inner, inner.detach().clone(), _unsafe_preserve_version_counter(inner)))

    def put_back(self) -> None:
        """As if nothing had been written."""
        for tensor, copy, version in reversed(self._copies):
            with torch.no_grad(), version:
                if has_memory(tensor):
                    tensor.copy_(copy)
        self._copies.clear()
        self._known.clear()
