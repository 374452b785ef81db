"""From tensors to a kernel launch: the table of addresses, the plan of chunks, the buffer for the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

import torch
import triton.language as tl
from torch import Tensor

from ampwise.census import kernel
from ampwise.census.algebra import Census
from ampwise.census.layout import BINADES, SINGLE

__all__ = ["Batch", "count_into_", "launch_census", "new_buffer", "read_census"]

# BF16 is read as the upper half of an FP32, which needs no conversion.
KERNEL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16}
ALIGNMENT = 16  # bytes, for vector loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which chunk belongs to which tensor. It depends on the sizes alone, so it is made once per model."""

    sizes: Tensor
    first_chunks: Tensor
    owners: Tensor
    chunks: tuple[int, ...]  # per tensor


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], device: torch.device) -> Plan:
    chunks = [math.ceil(size / kernel.CHUNK) for size in sizes]
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(chunks))
    return Plan(
        sizes=torch.tensor(sizes, dtype=torch.int64).to(device),
        first_chunks=torch.tensor([0, *accumulate(chunks)][:-1], dtype=torch.int32).to(device),
        owners=owners.to(device),
        chunks=tuple(chunks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The tensors of one dtype: one launch."""

    dtype: torch.dtype
    positions: tuple[int, ...]  # in the caller's list
    addresses: Tensor
    plan: Plan

    @property
    def chunks(self) -> int:
        return len(self.plan.owners)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What every kernel here starts with."""
        return self.addresses, self.plan.sizes, self.plan.first_chunks, self.plan.owners


class Batch:
    """Flat tensors of one device, ready to be read by a kernel as often as one likes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sizes = [tensor.numel() for tensor in tensors]
        self.kept: list[Tensor] = []  # what the addresses point into
        self.device = tensors[0].device
        self.has_ptx = self.device.type == "cuda" and torch.version.hip is None
        by_dtype = (
            [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.numel()]
            for dtype in KERNEL_DTYPES
        )
        self.groups = [self._group(tensors, positions) for positions in by_dtype if positions]
        self.rows = sum(len(group.positions) for group in self.groups)
        self.chunks = sum(group.chunks for group in self.groups)

    def _group(self, tensors: Sequence[Tensor], positions: list[int]) -> Group:
        aligned = [_aligned(tensors[i]) for i in positions]
        self.kept += aligned
        return Group(
            dtype=aligned[0].dtype,
            positions=tuple(positions),
            addresses=_addresses(aligned),
            plan=_plan(tuple(self.sizes[i] for i in positions), self.device),
        )


def launch_census(tensors: Sequence[Tensor]) -> Callable[[], list[Census]]:
    """Count flat tensors of one device, in one launch for each dtype; returns what fetches the result."""
    batch = Batch(tensors)
    buffer = new_buffer(batch)
    count_into_(buffer, batch)
    # Memory is reused in the stream's order, so the gradients may go now; an unread result must not hold them.
    batch.kept.clear()
    return lambda: read_census(buffer, batch)


def new_buffer(batch: Batch) -> Tensor:
    """All results in one, rows first and then the chunks' sums of squares, so that fetching is one copy."""
    return torch.zeros(batch.rows * SINGLE.columns + batch.chunks, dtype=torch.int64, device=batch.device)


def count_into_(buffer: Tensor, batch: Batch) -> None:
    """Launch the count; the buffer must be cleared."""
    cells = batch.rows * SINGLE.columns
    table, sums = buffer[:cells], buffer[cells:].view(torch.float64)
    for group in batch.groups:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device(batch.device) if batch.device.type == "cuda" else nullcontext():
            kernel.census_kernel[(group.chunks,)](
                *group.arguments, table, sums, ROW=SINGLE.columns, DTYPE=KERNEL_DTYPES[group.dtype],
                CHUNK=kernel.CHUNK, BLOCK=kernel.BLOCK, SLOW_BLOCK=kernel.SLOW_BLOCK, PTX=batch.has_ptx,
                num_warps=kernel.WARPS,
            )  # fmt: skip
        table, sums = table[len(group.positions) * SINGLE.columns :], sums[group.chunks :]


def read_census(buffer: Tensor, batch: Batch) -> list[Census]:
    """Fetch a buffer, which waits for the device, and read the censuses in the caller's order."""
    host, cells = buffer.cpu(), batch.rows * SINGLE.columns
    skipped, table = _trimmed(host[:cells].view(-1, SINGLE.columns))
    rows, sums = iter(table.tolist()), iter(host[cells:].view(torch.float64).tolist())
    found = [Census()] * len(batch.sizes)
    for group in batch.groups:
        for position, chunks in zip(group.positions, group.plan.chunks, strict=True):
            # In the order of the chunks, so that the sum is the same in every run.
            found[position] = SINGLE.census(next(rows), math.fsum(islice(sums, chunks)), skipped)
    return found


def _trimmed(table: Tensor) -> tuple[int, Tensor]:
    """The table without the lowest and highest binades that no tensor has, which are most of them."""
    used = table[:, BINADES:].any(0).nonzero().flatten().tolist() or [0]
    return used[0], torch.cat([table[:, :BINADES], table[:, BINADES + used[0] : BINADES + used[-1] + 1]], dim=1)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    # Pinned, so that the copy does not wait; torch keeps the page until the copy is done.
    table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
