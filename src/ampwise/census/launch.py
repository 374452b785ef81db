"""From tensors to a kernel launch: the table of addresses, the plan of chunks, the buffer for the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ampwise.census import kernel
from ampwise.census.algebra import Census
from ampwise.census.flat import KINDS
from ampwise.census.launcher import ALIGNMENT
from ampwise.census.layout import BINADES, SINGLE

__all__ = [
    "Batch",
    "Counted",
    "Plan",
    "address_table",
    "count_into_",
    "launch_census",
    "launching_on",
    "new_buffer",
    "plan_of",
    "read_census",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which chunk belongs to which tensor. It depends on sizes and dtypes alone, so it is made once per model."""

    sizes: Tensor
    kinds: Tensor
    first_chunks: Tensor
    owners: Tensor
    chunks: tuple[int, ...]  # per tensor
    present: frozenset[int]  # kinds


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], kinds: tuple[int, ...], device: torch.device) -> Plan:
    chunks = [math.ceil(size / kernel.CHUNK) for size in sizes]
    owners = [tensor for tensor, count in enumerate(chunks) for _ in range(count)]
    return Plan(
        sizes=torch.tensor(sizes, dtype=torch.int64, device=device),
        kinds=torch.tensor(kinds, dtype=torch.int32, device=device),
        first_chunks=torch.tensor([0, *accumulate(chunks)][:-1], dtype=torch.int32, device=device),
        owners=torch.tensor(owners, dtype=torch.int32, device=device),
        chunks=tuple(chunks),
        present=frozenset(kinds),
    )


class Batch:
    """Contiguous tensors of one device, ready to be read by the kernel as often as one likes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self.has_ptx = self.device.type == "cuda" and torch.version.hip is None
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.kept = list(tensors)  # what the addresses point into
        self.copied = [index for index, address in enumerate(addresses) if address % ALIGNMENT]
        for index in self.copied:
            self.kept[index] = tensors[index].clone()
            addresses[index] = self.kept[index].data_ptr()
        self.addresses = address_table(tuple(addresses), self.device)
        self.plan = plan_of(tensors)

    @property
    def cells(self) -> int:
        """Of the table: a row for each tensor."""
        return len(self.plan.chunks) * SINGLE.columns


class Counted:
    """Counts that are on their way: on the device until they are fetched."""

    def __init__(self, batch: Batch, buffer: Tensor) -> None:
        # Memory is reused in the stream's order, so the gradients may go now; an unread result must not hold them.
        batch.kept.clear()
        self.batch, self.buffer, self.sums = batch, buffer, _sums(buffer, batch)
        # A stream that captures means nothing outside; whoever replays the graph has to wait for it anyway.
        captured = batch.device.type != "cuda" or torch.cuda.is_current_stream_capturing()
        self._stream = None if captured else torch.cuda.current_stream(batch.device)

    def fetch(self) -> list[Census]:
        """Bring the counts to the host, which waits for the device."""
        if self._stream is not None:  # whoever asks may be on another
            torch.cuda.current_stream(self.batch.device).wait_stream(self._stream)
        return read_census(self.buffer, self.batch)


def launch_census(tensors: Sequence[Tensor], scale: Tensor | None = None, *, write: bool = False) -> Counted:
    """Count tensors of one device in one launch, divided by ``scale``; with ``write`` they stay divided."""
    batch = Batch(tensors)
    buffer = new_buffer(batch)
    count_into_(buffer, batch, scale, write=write)
    if write:
        for index in batch.copied:
            tensors[index].copy_(batch.kept[index])
    return Counted(batch, buffer)


def new_buffer(batch: Batch) -> Tensor:
    """All results in one, rows first and then the chunks' sums of squares, so that fetching is one copy."""
    return torch.zeros(batch.cells + len(batch.plan.owners), dtype=torch.int64, device=batch.device)


def count_into_(buffer: Tensor, batch: Batch, scale: Tensor | None = None, *, write: bool = False) -> None:
    """Launch the count; the buffer must be cleared."""
    plan = batch.plan
    if not len(plan.owners):
        return
    with launching_on(batch.device):
        kernel.census_kernel[(len(plan.owners),)](
            batch.addresses, plan.sizes, plan.kinds, plan.first_chunks, plan.owners,
            buffer, _sums(buffer, batch), buffer if scale is None else scale, ROW=SINGLE.columns,
            HAS_FP32=0 in plan.present, HAS_BF16=1 in plan.present, HAS_FP16=2 in plan.present,
            CHUNK=kernel.CHUNK, BLOCK=kernel.BLOCK, SLOW_BLOCK=kernel.SLOW_BLOCK,
            SCALED=scale is not None, WRITE=write, PTX=batch.has_ptx, num_warps=kernel.WARPS,
        )  # fmt: skip


def _sums(buffer: Tensor, batch: Batch) -> Tensor:
    """The part of a buffer that has the chunks' sums of squares."""
    return buffer[batch.cells :].view(torch.float64)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def plan_of(tensors: Sequence[Tensor]) -> Plan:
    """How tensors of one device are cut into chunks."""
    sizes = tuple([tensor.numel() for tensor in tensors])
    return _plan(sizes, tuple([KINDS[tensor.dtype] for tensor in tensors]), tensors[0].device)


def read_census(buffer: Tensor, batch: Batch) -> list[Census]:
    """Fetch a buffer, which waits for the device, and read the censuses in the tensors' order."""
    host = buffer.cpu()
    skipped, table = _trimmed(host[: batch.cells].view(-1, SINGLE.columns))
    sums = iter(_sums(host, batch).tolist())
    # In the order of the chunks, so that the sum is the same in every run.
    totals = (math.fsum(islice(sums, chunks)) for chunks in batch.plan.chunks)
    return [SINGLE.census(row, total, skipped) for row, total in zip(table.tolist(), totals, strict=True)]


def _trimmed(table: Tensor) -> tuple[int, Tensor]:
    """The table without the lowest and highest binades that no tensor has, which are most of them."""
    used = table[:, BINADES:].any(0).nonzero().flatten().tolist() or [0]
    return used[0], torch.cat([table[:, :BINADES], table[:, BINADES + used[0] : BINADES + used[-1] + 1]], dim=1)


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses where a kernel can read them, without waiting."""
    if device.type != "cuda":
        return torch.tensor(addresses, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _captured_table(addresses, device)
    return _uploaded_table(addresses, device, torch.cuda.current_stream(device).cuda_stream)


# Gradients mostly come back to where they were the step before: then there is nothing to upload.
@lru_cache(maxsize=32)
def _uploaded_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The addresses on the device, in the order of the stream whose number is part of the key."""
    # Pinned, so that the copy does not wait; torch keeps the page until the copy is done.
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=True)
    return table.to(device, non_blocking=True)


def _captured_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """In a graph being captured, each address is a constant of the graph: there is no host memory to keep."""
    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    for cell, address in zip(table, addresses, strict=True):
        cell.fill_(address)
    return table
