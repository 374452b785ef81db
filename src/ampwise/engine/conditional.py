"""Copies that a flag on the device decides on, so that the host need not know."""

from __future__ import annotations

import torch
from torch import Tensor

from ampwise.census.launcher import has_kernels
from ampwise.tensors_on_disk import WHOLE_NUMBERS

__all__ = ["Conditional", "Pair", "are_alike", "as_numbers", "room_for"]

Pair = tuple[Tensor, Tensor]  # target, source


class Conditional:
    """Copies on one device that a flag there decides on: by the kernel where it can, else one by one."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()  # for the kernel
        self._others: list[Pair] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        if target.is_cuda and has_kernels() and _is_readable(target, source):
            self._rows += (source.data_ptr(), target.data_ptr(), source.nbytes)
        else:
            self._others.append((target, source))

    def copy_if_(self, found_inf: Tensor) -> None:
        if self._rows:
            from ampwise.engine.statistics_kernel import launch_copy_if_

            launch_copy_if_(self._rows, found_inf)
        for target, source in self._others:
            bits = as_numbers(target)
            bits.copy_(torch.where(found_inf != 0, as_numbers(source.to(target)), bits))


def as_numbers(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, of which every dtype's bits can be compared and chosen from."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(WHOLE_NUMBERS[parts.itemsize])


def room_for(buffer: Tensor, *, on_host: bool = False) -> Tensor:
    with torch.inference_mode(False):  # it outlives a block that the first step may be in
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu" if on_host else buffer.device)


def are_alike(one: Tensor, other: Tensor, *, on_host: bool = False) -> bool:
    """Whether the first is as ``room_for`` makes it for the other."""
    device = torch.device("cpu") if on_host else other.device
    return one.dtype == other.dtype and one.device == device and one.shape == other.shape


def _is_readable(target: Tensor, source: Tensor) -> bool:
    """Whether the kernel can copy it byte by byte. The address of a subclass of tensors may mean nothing."""
    return are_alike(target, source) and type(target) is Tensor and target.is_contiguous() and source.is_contiguous()
