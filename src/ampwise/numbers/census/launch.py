"""Launch the census kernel: table of addresses, plan of chunks, buffer for the results."""

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

from ampwise.numbers.census import kernel
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.count_row import BINADES, SINGLE
from ampwise.numbers.census.flat_values import DTYPE_CODES
from ampwise.numbers.census.kernels import ALIGNMENT

__all__ = [
    "ChunkPlan",
    "PendingCensus",
    "TensorBatch",
    "address_table",
    "count_into_",
    "launch_census",
    "launching_on",
    "new_buffer",
    "plan_of",
    "read_census",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Which chunk belongs to which tensor. It depends only on sizes and dtypes, so it is made once per model."""

    sizes: Tensor
    kinds: Tensor
    first_chunks: Tensor
    owners: Tensor
    chunks: tuple[int, ...]  # per tensor
    present: frozenset[int]  # kinds that occur


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], kinds: tuple[int, ...], device: torch.device) -> ChunkPlan:
    chunks = [math.ceil(size / kernel.CHUNK) for size in sizes]
    owners = [tensor for tensor, count in enumerate(chunks) for _ in range(count)]
    return ChunkPlan(
        sizes=torch.tensor(sizes, dtype=torch.int64, device=device),
        kinds=torch.tensor(kinds, dtype=torch.int32, device=device),
        first_chunks=torch.tensor([0, *accumulate(chunks)][:-1], dtype=torch.int32, device=device),
        owners=torch.tensor(owners, dtype=torch.int32, device=device),
        chunks=tuple(chunks),
        present=frozenset(kinds),
    )


class TensorBatch:
    """Contiguous tensors of one device, ready to be read by the kernel any number of times."""

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
        """Number of cells of the table, which has a row for each tensor."""
        return len(self.plan.chunks) * SINGLE.columns


class PendingCensus:
    """Counts on the device, until they are fetched."""

    def __init__(self, batch: TensorBatch, buffer: Tensor) -> None:
        # Memory is reused in stream order, so the gradients can be freed now; an unread result must not hold them.
        batch.kept.clear()
        self.batch, self.buffer, self.sums = batch, buffer, _sums(buffer, batch)
        # A capturing stream cannot be waited for outside; the user of a replayed graph has to sync with it anyway.
        captured = batch.device.type != "cuda" or torch.cuda.is_current_stream_capturing()
        self._stream = None if captured else torch.cuda.current_stream(batch.device)

    def fetch(self) -> list[Census]:
        """Copy the counts to the host, which syncs with the device."""
        if self._stream is not None:  # the caller may be on another stream
            torch.cuda.current_stream(self.batch.device).wait_stream(self._stream)
        return read_census(self.buffer, self.batch)


def launch_census(tensors: Sequence[Tensor], scale: Tensor | None = None, *, write: bool = False) -> PendingCensus:
    """Count tensors of one device in one launch, divided by ``scale``; with ``write``, also divide them in memory."""
    batch = TensorBatch(tensors)
    buffer = new_buffer(batch)
    count_into_(buffer, batch, scale, write=write)
    if write:
        for index in batch.copied:
            tensors[index].copy_(batch.kept[index])
    return PendingCensus(batch, buffer)


def new_buffer(batch: TensorBatch) -> Tensor:
    """Return a buffer for all results, rows and then the chunks' sums of squares, so that fetching is one copy."""
    return torch.zeros(batch.cells + len(batch.plan.owners), dtype=torch.int64, device=batch.device)


def count_into_(buffer: Tensor, batch: TensorBatch, scale: Tensor | None = None, *, write: bool = False) -> None:
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


def _sums(buffer: Tensor, batch: TensorBatch) -> Tensor:
    """Return the part of a buffer that holds the chunks' sums of squares."""
    return buffer[batch.cells :].view(torch.float64)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes this the current device, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def plan_of(tensors: Sequence[Tensor]) -> ChunkPlan:
    """Return how tensors of one device are split into chunks."""
    sizes = tuple([tensor.numel() for tensor in tensors])
    return _plan(sizes, tuple([DTYPE_CODES[tensor.dtype] for tensor in tensors]), tensors[0].device)


def read_census(buffer: Tensor, batch: TensorBatch) -> list[Census]:
    """Fetch a buffer, which syncs with the device, and return the censuses in the tensors' order."""
    host = buffer.cpu()
    skipped, table = _trimmed(host[: batch.cells].view(-1, SINGLE.columns))
    sums = iter(_sums(host, batch).tolist())
    # In the order of the chunks, so that the sum is the same in every run.
    totals = (math.fsum(islice(sums, chunks)) for chunks in batch.plan.chunks)
    return [SINGLE.census(row, total, skipped) for row, total in zip(table.tolist(), totals, strict=True)]


def _trimmed(table: Tensor) -> tuple[int, Tensor]:
    """Return the table without the lowest and highest binades that no tensor has, which are most of them."""
    used = table[:, BINADES:].any(0).nonzero().flatten().tolist() or [0]
    return used[0], torch.cat([table[:, :BINADES], table[:, BINADES + used[0] : BINADES + used[-1] + 1]], dim=1)


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses in device memory, without a sync."""
    if device.type != "cuda":
        return torch.tensor(addresses, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _captured_table(addresses, device)
    return _uploaded_table(addresses, device, torch.cuda.current_stream(device).cuda_stream)


# Gradients are mostly at the same addresses as in the step before: then there is nothing to upload.
@lru_cache(maxsize=32)
def _uploaded_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Upload addresses in stream order; the stream is part of the cache key."""
    # Pinned, so that the copy does not sync; torch keeps the page until the copy is done.
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=True)
    return table.to(device, non_blocking=True)


def _captured_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the addresses for a graph capture, as constants of the graph: there is no host memory to keep."""
    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    for cell, address in zip(table, addresses, strict=True):
        cell.fill_(address)
    return table
