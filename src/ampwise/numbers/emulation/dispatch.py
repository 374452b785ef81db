"""Dispatch details of torch that emulation must change, so that every matmul is intercepted exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._ops import key_extractor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

__all__ = ["below_other_modes", "mha_fastpath_disabled", "must_decompose"]

BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@contextmanager
def mha_fastpath_disabled() -> Iterator[None]:
    """Disable the fused inference path of nn.MultiheadAttention."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def must_decompose(func: Any, args: Any) -> bool:
    """Return whether this is a composite operator that a dispatch mode has to decompose itself.

    Autograd decomposes operators before a mode sees them, but not in inference mode, nor for tensors created there. An
    operator with a kernel of its own, as for nested tensors, stays whole.
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
def below_other_modes(mode: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode below all others, so that they, such as a tracer, see the original matmul and not its emulation."""
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
