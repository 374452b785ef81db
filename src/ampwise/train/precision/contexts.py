"""Contexts for forward and backward passes: autocast, and torch's TF32 settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ampwise.train.precision.precision import TrainPrecision
from ampwise.train.precision.tf32 import tf32_setting

__all__ = ["NO_CONTEXT", "PrecisionContexts"]

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


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
