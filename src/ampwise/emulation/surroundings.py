"""What torch must do otherwise, so that every product of a model is seen, and seen once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._ops import key_extractor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

__all__ = ["below_others", "by_its_parts", "is_taken_apart"]

BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@contextmanager
def by_its_parts() -> Iterator[None]:
    """nn.MultiheadAttention, which evaluates in one operation."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def is_taken_apart(func: Any, args: Any) -> bool:
    """Of operations that are made of others, which a mode has to take apart by itself.

    Autograd does it before a mode sees them; in inference mode, and for tensors made there, it is left out. What has a
    kernel of its own, such as a layer of nested tensors, stays one operation.
    """
    if not _is_composite(func):
        return False
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    backend = key_extractor(tensors, BACKENDS).highestPriorityTypeId()
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), backend)


@lru_cache(maxsize=8192)
def _is_composite(func: Any) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


@contextmanager
def below_others(mode: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode so that others, such as a tracer, see the product that is asked for and not how it is emulated."""
    others = _get_current_dispatch_mode_stack()
    _taken_off(others)
    try:
        with mode:
            _put_on(others)
            try:
                yield
            finally:
                _taken_off(others)
    finally:
        _put_on(others)


def _put_on(modes: Sequence[Any]) -> None:
    for mode in modes:
        _push_mode(mode)


def _taken_off(modes: Sequence[Any]) -> None:
    for _ in modes:
        _pop_mode()
