"""``census``: tensors in, counts out, by the fastest way the device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar, overload

import torch
from torch import Tensor

from ampwise.census.algebra import Census
from ampwise.census.cpu import count_on_cpu
from ampwise.census.device import DeviceCensus
from ampwise.census.flat import flat_values
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

    Several CUDA tensors are counted in one launch (one for each dtype among them), and the result stays on the
    device until it is looked at. One tensor gives its Census at once, which on CUDA waits for the device.
    FP64, FP32, BF16, FP16 and FP8, any strides; of a DTensor, the local shard.

    >>> counts = census(torch.tensor([1.0, -3.0, 0.0, 1e-8]))
    >>> counts.zeros, counts.amax, counts.flushed("fp16")
    (1, 3.0, Count(1))
    >>> census({"weight": torch.ones(3), "bias": torch.zeros(2)})["bias"].zeros
    2
    """
    if isinstance(tensors, Mapping):
        return DeviceCensus(list(tensors), _measure(tensors))
    (only,) = _measure({"": tensors})
    return only()[""]


def _measure(tensors: Mapping[str, Tensor]) -> list[Later[dict[str, Census]]]:
    """Measure tensors where they are: in one launch for all of a GPU's, one after another elsewhere."""
    flat = {name: _kernel_dtype(flat_values(tensor, name or None)) for name, tensor in tensors.items()}
    parts: list[Later[dict[str, Census]]] = []
    launch = _launcher()
    if launch is not None:
        for device in dict.fromkeys(values.device for values in flat.values()):
            batch = {name: values for name, values in flat.items() if values.device == device and _for_kernel(values)}
            if batch:
                parts.append(_named(list(batch), launch(list(batch.values()))))
                flat = {name: values for name, values in flat.items() if name not in batch}
    if flat:
        singles = [_count(values) for values in flat.values()]
        parts.append(_named(list(flat), lambda: [single() for single in singles]))
    return parts


def _named(names: list[str], fetch: Later[list[Census]]) -> Later[dict[str, Census]]:
    return lambda: dict(zip(names, fetch(), strict=True))


def _count(flat: Tensor) -> Later[Census]:
    """The census of one flat tensor, without a kernel."""
    layout = DOUBLE if flat.dtype == torch.float64 else SINGLE
    if flat.device.type != "cuda":
        row, sum_squares = count_on_cpu(flat.cpu())
        counted = layout.census(row.tolist(), sum_squares)
        return lambda: counted
    device_row, device_sum = count_in_torch(flat if layout is DOUBLE else flat.float())
    return lambda: layout.census(device_row.tolist(), device_sum.item())


def _kernel_dtype(flat: Tensor) -> Tensor:
    """FP8 widened to FP32 on a GPU: the kernel reads 16 and 32 bits, and the widening is exact."""
    return flat.float() if flat.device.type == "cuda" and flat.element_size() == 1 else flat


def _for_kernel(flat: Tensor) -> bool:
    return flat.device.type == "cuda" and flat.dtype != torch.float64


@cache
def _launcher() -> Callable[[Sequence[Tensor]], Later[list[Census]]] | None:
    """The kernel's launcher, where Triton is installed."""
    try:
        from ampwise.census.launch import launch_census
    except ImportError:
        return None
    return launch_census
