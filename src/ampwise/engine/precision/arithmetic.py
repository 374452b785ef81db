"""The arithmetic of a pass: autocast and torch's switches for FP32 products, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ampwise.engine.precision.precision import Precision
from ampwise.engine.precision.switches import fp32_products

__all__ = ["Arithmetic"]

AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class Arithmetic:
    """A precision on a kind of device. Outside of its blocks everything is as the user has set it."""

    def __init__(
        self,
        precision: Precision,
        device_type: str,
        *,
        cached: bool = True,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.precision = precision
        self._device_type = device_type
        self._around = around  # what else passes run inside of, forward and backward
        self._cached = cached  # copies of weights, from their first use in a block to its end

    def products(self) -> AbstractContextManager[Any]:
        """What passes run inside of, forward and backward: for one, the switches for FP32 products."""
        switched = AS_IT_IS if self.precision.tf32 is None else fp32_products(self.precision.tf32)
        return switched if self._around is None else _both(switched, self._around())

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast. Where there is none, it is off, whatever is around."""
        dtype = self.precision.dtype
        if dtype is None:
            return self.backward()
        return torch.autocast(self._device_type, dtype, cache_enabled=None if self._cached else False)

    def backward(self) -> AbstractContextManager[Any]:
        """Without autocast: each operation runs backward in what it ran in forward."""
        if not torch.is_autocast_enabled(self._device_type):
            return AS_IT_IS
        return torch.autocast(self._device_type, enabled=False)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
