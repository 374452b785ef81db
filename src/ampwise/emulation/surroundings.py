"""What torch must do otherwise, so that every product of a model is seen, and seen once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["below_others", "by_its_parts"]


@contextmanager
def by_its_parts() -> Iterator[None]:
    """nn.MultiheadAttention, which evaluates in one operation."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


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
