"""The arithmetic of a pass: autocast and torch's switches for FP32 products, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ampwise.engine.precision.precision import Precision
from ampwise.engine.precision.switches import fp32_products

__all__ = ["Arithmetic"]


class Arithmetic:
    """A precision on a kind of device. Outside of its blocks everything is as the user has set it."""

    def __init__(self, precision: Precision, device_type: str, *, cached: bool = True) -> None:
        self.precision = precision
        self._device_type = device_type
        self._cached = cached  # copies of weights, from their first use in a block to its end

    @contextmanager
    def forward(self) -> Iterator[None]:
        dtype = self.precision.dtype
        cached = None if self._cached else False
        with (
            fp32_products(self.precision.tf32),
            torch.autocast(self._device_type, dtype, enabled=dtype is not None, cache_enabled=cached),
        ):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Without autocast: each operation runs backward in what it ran in forward."""
        with fp32_products(self.precision.tf32):
            if not torch.is_autocast_enabled(self._device_type):
                yield
                return
            with torch.autocast(self._device_type, enabled=False):
                yield
