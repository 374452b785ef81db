"""Numbers that may be on the device, where reading them would sync."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from ampwise.train.accumulator import Weight
from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.train.scaler.gradients import to_device

__all__ = ["device_scalar", "start_host_copy", "total_weight"]

T = TypeVar("T")


def total_weight(weights: Iterable[Weight | None]) -> Weight | None:
    """Return the total weight of a micro-batch's pieces; None without weights.

    >>> total_weight([2.0, 3.0]), total_weight([None])
    (5.0, None)
    """
    total: Weight | None = None
    for weight in weights:
        if weight is not None:
            wide = weight.double() if isinstance(weight, Tensor) else weight  # the sum of a mask may be in uint8
            total = wide if total is None else total + wide
    return total


def device_scalar(number: Weight, device: torch.device) -> Tensor:
    """Return a number as an FP32 scalar on the device. ``torch.full``, as a copy from the host would sync."""
    if isinstance(number, Tensor):
        return to_device(number.float(), device)
    return torch.full((), number, dtype=torch.float32, device=device)


def start_host_copy(number: T | Tensor) -> T | AsyncScalars:
    """Start copying a tensor's number to the host, as it may change before it is read; return other numbers as is."""
    return AsyncScalars(number.detach().reshape(1)) if isinstance(number, Tensor) else number
