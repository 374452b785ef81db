"""Set torch's TF32 settings for a while, then restore them.

Since torch 2.9 each setting has an old name (``allow_tf32``) and a new one (``fp32_precision``), stored in two places.
The old setter writes both; the new one only its own, and if the two disagree, reading the old name raises. The new ones
also form a tree: an operation inherits from ``torch.backends.cudnn.fp32_precision``, and that inherits from
``torch.backends.fp32_precision``, but reading a value does not show whether it is inherited.

So there are two ways. If the old names can be read and nothing is set above the operations, the old setter is used: a
model that reads ``allow_tf32``, or enters ``torch.backends.cudnn.flags``, can do so inside. If the user has set the new
names, those are used, from the top: inherited settings stay inherited.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["tf32_setting"]

# Looked up once: the lookup takes longer than reading them, which happens at every step.
matmul: Any = torch.backends.cuda.matmul
cudnn: Any = torch.backends.cudnn
backends: Any = torch.backends

HAS_NEW_NAMES = hasattr(cudnn, "conv")  # torch 2.9 and later
ON_CUDNN = (cudnn.conv, cudnn.rnn) if HAS_NEW_NAMES else ()
ON_CUDA = (matmul, *ON_CUDNN)
MATMULS = (matmul, backends.mkldnn.matmul) if HAS_NEW_NAMES else ()  # what the old matmul precision writes


def tf32_setting(tf32: bool | None) -> AbstractContextManager[None]:
    """Return a context in which FP32 matmuls and convolutions on CUDA may or may not use TF32; None: no change.

    The settings affect the whole process, and are restored on exit. The context is reusable and reentrant.

    >>> with tf32_setting(tf32=True):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    """
    return nullcontext() if tf32 is None else _Switched(tf32)


class _Switched(AbstractContextManager[None]):
    __slots__ = ("_tf32", "_undone_by")

    def __init__(self, tf32: bool) -> None:
        self._tf32 = tf32
        self._undone_by: list[Callable[[], None] | None] = []

    def __enter__(self) -> None:
        self._undone_by.append(None if _already(self._tf32) else _switch(self._tf32))

    def __exit__(self, *_: object) -> None:
        undo = self._undone_by.pop()
        if undo is not None:
            undo()


def _already(tf32: bool) -> bool:
    if HAS_NEW_NAMES:  # they give the effective setting, and never raise
        return all((switch.fp32_precision == "tf32") is tf32 for switch in ON_CUDA)
    return matmul.allow_tf32 is tf32 and cudnn.allow_tf32 is tf32


def _switch(tf32: bool) -> Callable[[], None]:
    """Change the settings that differ; return a function that restores them."""
    old = _old_names()
    return _by_new_names(tf32) if old is None else _by_old_names(tf32, *old)


def _old_names() -> tuple[str, bool] | None:
    """Return the matmul precision and cuDNN's TF32; None if the old names cannot express what is set."""
    if HAS_NEW_NAMES and (cudnn.fp32_precision != "none" or backends.mkldnn.fp32_precision != "none"):
        return None
    try:
        _hear_once()
        _ = matmul.allow_tf32  # raises in cases where get_float32_matmul_precision() does not
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        return None


def _by_old_names(tf32: bool, precision: str, on_cudnn: bool) -> Callable[[], None]:
    change_matmul = (precision != "highest") is not tf32
    change_cudnn = on_cudnn is not tf32
    # Write only what must change: cuDNN's defaults inherit from the name above them, and torch has no way to make
    # them inherit again.
    changed = (*(MATMULS if change_matmul else ()), *(ON_CUDNN if change_cudnn else ()))
    new = [(switch, switch.fp32_precision) for switch in changed]
    if change_matmul and tf32:
        matmul.allow_tf32 = True
    elif change_matmul:
        # For the CPU's matmuls too: with "highest" for CUDA alone, reading the precision raises.
        torch.set_float32_matmul_precision("highest")
    if change_cudnn:
        cudnn.allow_tf32 = tf32

    def undo() -> None:
        if change_matmul:
            torch.set_float32_matmul_precision(precision)
        if change_cudnn:
            cudnn.allow_tf32 = on_cudnn
        for switch, value in new:
            switch.fp32_precision = value

    return undo


def _by_new_names(tf32: bool) -> Callable[[], None]:
    wanted, above = "tf32" if tf32 else "ieee", _set_for_cuda()
    cudnn.fp32_precision = wanted
    # Settings that did not inherit the new value have one of their own: what is read was set.
    own = [(switch, value) for switch in ON_CUDA if ((value := switch.fp32_precision) == "tf32") is not tf32]
    for switch, _ in own:
        switch.fp32_precision = wanted

    def undo() -> None:
        for switch, value in own:
            switch.fp32_precision = value
        cudnn.fp32_precision = above

    return undo


def _set_for_cuda() -> str:
    """Return what ``torch.backends.cudnn.fp32_precision`` was set to: "none" if it inherits."""
    seen, above = cudnn.fp32_precision, backends.fp32_precision
    if seen != above or seen == "none":
        return str(seen)
    backends.fp32_precision = "ieee" if above == "tf32" else "tf32"
    follows = cudnn.fp32_precision != seen
    backends.fp32_precision = above
    return "none" if follows else str(seen)


@cache
def _hear_once() -> None:
    """Suppress torch's one-time warning that the old names are deprecated: the user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()
