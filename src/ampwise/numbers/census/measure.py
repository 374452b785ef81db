"""``census``: count tensors by the fastest method of their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, overload

import torch
from torch import Tensor

from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.count_row import DOUBLE, SINGLE, count_in_torch
from ampwise.numbers.census.cpu import count_on_cpu
from ampwise.numbers.census.device_census import DeviceCensus
from ampwise.numbers.census.flat_values import flat_values
from ampwise.numbers.census.kernels import launcher

T = TypeVar("T")
Later = Callable[[], T]  # a result whose fetch may sync


@overload
def census(tensors: Tensor) -> Census: ...
@overload
def census(tensors: Mapping[str, Tensor]) -> DeviceCensus: ...
def census(tensors: Tensor | Mapping[str, Tensor]) -> Census | DeviceCensus:
    """Count the values of a tensor, or of several tensors by name, without changing them.

    Several CUDA tensors are counted in one launch (except FP64), and the result stays on the device until it is
    read. A single tensor returns its Census at once, which on CUDA syncs with the device. Takes FP64, FP32, BF16, FP16
    and FP8 with any strides; of a DTensor, the local shard.

    Args:
        tensors: a tensor, or tensors by name.

    Returns:
        a ``Census`` of one tensor; of several, a ``DeviceCensus``, a mapping from their names.

    Raises:
        UnsupportedTensor: not a floating-point tensor.

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
    """Count tensors on their devices: in one launch for each GPU, one after another elsewhere."""
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
    """Count one flat tensor without a kernel."""
    layout = DOUBLE if flat.dtype == torch.float64 else SINGLE
    if not flat.is_cuda:
        row, sum_squares = count_on_cpu(flat.cpu())
        counted = layout.census(row.tolist(), sum_squares)
        return lambda: counted
    device_row, device_sum = count_in_torch(flat if layout is DOUBLE else flat.float())
    return lambda: layout.census(device_row.tolist(), device_sum.item())
