"""Copy tensors if a flag on the device is set, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.numbers.census.kernels import has_kernels
from ampwise.runs.tensor_files import INTEGER_BY_SIZE

__all__ = ["ConditionalCopy", "TensorPair", "as_integers", "empty_copy", "same_layout"]

TensorPair = tuple[Tensor, Tensor]  # target, source


class ConditionalCopy:
    """Copies on one device, done if a flag there is set: in one kernel where possible, else one by one."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()  # for the kernel
        self._others: list[TensorPair] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        if target.is_cuda and has_kernels() and _is_readable(target, source):
            self._rows += (source.data_ptr(), target.data_ptr(), source.nbytes)
        else:
            self._others.append((target, source))

    def copy_if_(self, found_inf: Tensor) -> None:
        if self._rows:
            from ampwise.train.copy_if_kernel import launch_copy_if_

            launch_copy_if_(self._rows, found_inf)
        for target, source in self._others:
            bits = as_integers(target)
            bits.copy_(torch.where(found_inf != 0, as_integers(source.to(target)), bits))


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's bits as integers, which torch can compare and select for every dtype."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(INTEGER_BY_SIZE[parts.itemsize])


def empty_copy(buffer: Tensor, *, on_host: bool = False) -> Tensor:
    """Return an empty tensor like this one, on its device or on the host."""
    with torch.inference_mode(False):  # it outlives an inference_mode block around the first step
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu" if on_host else buffer.device)


def same_layout(one: Tensor, other: Tensor, *, on_host: bool = False) -> bool:
    """Return whether the first has dtype, shape and device of ``empty_copy(other)``."""
    device = torch.device("cpu") if on_host else other.device
    return one.dtype == other.dtype and one.device == device and one.shape == other.shape


def _is_readable(target: Tensor, source: Tensor) -> bool:
    """Return whether the kernel can copy this byte by byte; not for tensor subclasses, whose address may be invalid."""
    return same_layout(target, source) and type(target) is Tensor and target.is_contiguous() and source.is_contiguous()
