"""Contexts for forward and backward passes: autocast, and torch's TF32 settings.

Since torch 2.9 each TF32 setting has an old name (``allow_tf32``) and a new one (``fp32_precision``), stored in two
places. The old setter writes both; the new one only its own, and if the two disagree, reading the old name raises. The
new ones also form a tree: an operation inherits from ``torch.backends.cudnn.fp32_precision``, and that inherits from
``torch.backends.fp32_precision``, but reading a value does not show whether it is inherited.

So there are two ways. If the old names can be read and nothing is set above the operations, the old setter is used: a
model that reads ``allow_tf32``, or enters ``torch.backends.cudnn.flags``, can do so inside. If the user has set the new
names, those are used, from the top: inherited settings stay inherited.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ampwise.train.precision.precision import TrainPrecision

__all__ = ["NO_CONTEXT", "PrecisionContexts", "tf32_setting"]

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()

# Looked up once: the lookup takes longer than reading them, which happens at every step.
matmul: Any = torch.backends.cuda.matmul
cudnn: Any = torch.backends.cudnn
backends: Any = torch.backends

HAS_NEW_NAMES = hasattr(cudnn, "conv")  # torch 2.9 and later
ON_CUDNN = (cudnn.conv, cudnn.rnn) if HAS_NEW_NAMES else ()
ON_CUDA = (matmul, *ON_CUDNN)
MATMULS = (matmul, backends.mkldnn.matmul) if HAS_NEW_NAMES else ()  # what the old matmul precision writes


class PrecisionContexts:
    """Contexts of a precision on a device type. Outside them, the user's settings apply."""

    def __init__(
        self,
        precision: TrainPrecision,
        device_type: str,
        *,
        cached: bool = True,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.precision = precision
        self._device_type = device_type
        self._around = around  # returns a further context for forward and backward
        self._cached = cached  # whether autocast caches its copies of weights

    def pass_context(self) -> AbstractContextManager[Any]:
        """Return the context for forward and backward together: TF32 settings and the plugin's context."""
        switched = NO_CONTEXT if self.precision.tf32 is None else tf32_setting(self.precision.tf32)
        return switched if self._around is None else _both(switched, self._around())

    def forward(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass; autocast off, if the precision has none."""
        dtype = self.precision.dtype
        if dtype is None:
            return self.backward()
        return torch.autocast(self._device_type, dtype, cache_enabled=None if self._cached else False)

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context for a backward pass, without autocast: operations use the dtypes of their forward."""
        if not torch.is_autocast_enabled(self._device_type):
            return NO_CONTEXT
        return torch.autocast(self._device_type, enabled=False)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


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
        tf32, undo = self._tf32, None
        if HAS_NEW_NAMES:  # they give the effective setting, and never raise
            already = all((switch.fp32_precision == "tf32") is tf32 for switch in ON_CUDA)
        else:
            already = matmul.allow_tf32 is tf32 and cudnn.allow_tf32 is tf32
        if not already:
            old = _old_names()
            undo = _by_new_names(tf32) if old is None else _by_old_names(tf32, *old)
        self._undone_by.append(undo)

    def __exit__(self, *_: object) -> None:
        undo = self._undone_by.pop()
        if undo is not None:
            undo()


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
    """Change the settings that differ; return a function that restores them."""
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
    """Change the settings that differ; return a function that restores them."""
    # What torch.backends.cudnn.fp32_precision was set to: "none" if it inherits, which a change above it shows.
    above, top = cudnn.fp32_precision, backends.fp32_precision
    if above == top != "none":
        backends.fp32_precision = "ieee" if top == "tf32" else "tf32"
        inherits = cudnn.fp32_precision != above
        backends.fp32_precision = top
        above = "none" if inherits else above
    wanted = "tf32" if tf32 else "ieee"
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


@cache
def _hear_once() -> None:
    """Suppress torch's one-time warning that the old names are deprecated: the user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()
