"""Numbers that may be on the device, where reading them would wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from ampwise.engine.scaling.facts import Posted
from ampwise.engine.scaling.gradients import there
from ampwise.engine.window import Weight

__all__ = ["on_device", "posted", "total_of"]

T = TypeVar("T")


def total_of(weights: Iterable[Weight | None]) -> Weight | None:
    """Of all pieces of a micro-batch; None where nothing is weighed.

    >>> total_of([2.0, 3.0]), total_of([None])
    (5.0, None)
    """
    total: Weight | None = None
    for weight in weights:
        if weight is not None:
            wide = weight.double() if isinstance(weight, Tensor) else weight  # a mask may be summed in bytes
            total = wide if total is None else total + wide
    return total


def on_device(number: Weight, device: torch.device) -> Tensor:
    """In FP32. A number is filled in, since a copy from the host would wait."""
    if isinstance(number, Tensor):
        return there(number.float(), device)
    return torch.full((), number, dtype=torch.float32, device=device)


def posted(number: T | Tensor) -> T | Posted:
    """A number that may change before someone asks."""
    return Posted(number.detach().reshape(1)) if isinstance(number, Tensor) else number
