"""Dispatch mode that sees every operation of a run: it undoes writes, and makes both sides draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.trace.recorder import UndoMode, tensors_in
from ampwise.trace.undo import written_arguments
from ampwise.tune.diff.module_calls import ModuleCalls, is_backward
from ampwise.tune.diff.shared_random import SEEDED, SharedRandom

__all__ = ["DiffMode"]


class DiffMode(UndoMode):
    """Reports each writing operation to the calls, and counts rounding operations."""

    def __init__(self, calls: ModuleCalls, draws: SharedRandom) -> None:
        super().__init__()
        self.calls, self._draws = calls, draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in(args):
            self.note_leaf(tensor)
        if _is_view(func):
            return func(*args, **(kwargs or {}))
        begun = self.calls.begins(func, args)
        for tensor in _written(func, args, kwargs or {}):
            with _disable_current_modes():
                self.calls.before_write(tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.ends(begun, func, args, result)
        return result

    def note_leaf(self, tensor: Tensor) -> None:
        """Clear a leaf's gradient, so that it holds that of this run only."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.leaves:
            super().note_leaf(tensor)
            tensor.grad = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_backward():
            self.calls.count_operation()
        return self._draws(func, args, kwargs) if _draws(func) else func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, name in written_arguments(func):
        yield from tensors_in((args[position] if position < len(args) else kwargs.get(name),))


@lru_cache(maxsize=8192)
def _is_view(func: Any) -> bool:
    """Whether it only returns views of existing memory."""
    aliased = [each.alias_info for each in func._schema.returns]
    return bool(aliased) and all(info is not None and not info.is_write for info in aliased)


@lru_cache(maxsize=8192)
def _draws(func: Any) -> bool:
    return SEEDED in func.tags
