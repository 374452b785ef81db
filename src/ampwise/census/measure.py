"""``census``: tensors in, counts out, by the fastest way the device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, overload

import torch
from torch import Tensor

from ampwise.census.algebra import Census
from ampwise.census.cpu import count_on_cpu
from ampwise.census.device import DeviceCensus
from ampwise.census.flat import flat_values
from ampwise.census.launcher import launcher
from ampwise.census.layout import DOUBLE, SINGLE
from ampwise.census.reference import count_in_torch

__all__ = ["census"]

T = TypeVar("T")
Later = Callable[[], T]  # a result that may have to be waited for


@overload
def census(tensors: Tensor) -> Census: ...
@overload
def census(tensors: Mapping[str, Tensor]) -> DeviceCensus: ...
def census(tensors: Tensor | Mapping[str, Tensor]) -> Census | DeviceCensus:
    """Count what a tensor holds, or each of several tensors by name, without changing them.

    Several CUDA tensors are counted in one launch (FP64 aside), and the result stays on the device until it is
    looked at. One tensor gives its Census at once, which on CUDA waits for the device. FP64, FP32, BF16, FP16
    and FP8, any strides; of a DTensor, the local shard.

    >>> counts = census(torch.tensor([1.0, -3.0, 0.0, 1e-8]))
    >>> counts.zeros, counts.amax, counts.flushed("fp16")
    (1, 3.0, Count(1))
    >>> census({"weight": torch.ones(3), "bias": torch.zeros(2)})["bias"].zeros
    2
    """
    if isinstance(tensors, Mapping):
        return DeviceCensus(list(tensors), _measure(tensors))
    return DeviceCensus([""], _measure({"": tensors}))[""]


def _measure(tensors: Mapping[str, Tensor]) -> list[Later[dict[str, Census]]]:
    """Measure tensors where they are: in one launch for all of a GPU's, one after another elsewhere."""
    batches: dict[torch.device, dict[str, Tensor]] = {}
    singles: dict[str, Later[Census]] = {}
    launch = launcher()
    for name, tensor in tensors.items():
        values = flat_values(tensor, name or None)
        if launch and values.is_cuda and values.dtype != torch.float64:
            # The kernel reads 16 and 32 bits; widening FP8 is exact.
            batches.setdefault(values.device, {})[name] = values.float() if values.element_size() == 1 else values
        else:
            singles[name] = _count(values.detach().view(-1).resolve_neg())
    parts = [_named(list(batch), launch(list(batch.values())).fetch) for batch in batches.values() if launch]
    return [*parts, lambda: {name: single() for name, single in singles.items()}]


def _named(names: list[str], fetch: Later[list[Census]]) -> Later[dict[str, Census]]:
    return lambda: dict(zip(names, fetch(), strict=True))


def _count(flat: Tensor) -> Later[Census]:
    """The census of one flat tensor, without a kernel."""
    layout = DOUBLE if flat.dtype == torch.float64 else SINGLE
    if not flat.is_cuda:
        row, sum_squares = count_on_cpu(flat.cpu())
        counted = layout.census(row.tolist(), sum_squares)
        return lambda: counted
    device_row, device_sum = count_in_torch(flat if layout is DOUBLE else flat.float())
    return lambda: layout.census(device_row.tolist(), device_sum.item())
