"""From tensors to a kernel launch: the table of addresses, the plan of chunks, the buffer for the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from ampwise.census import kernel
from ampwise.census.algebra import Census
from ampwise.census.flat import KINDS
from ampwise.census.layout import BINADES, SINGLE

__all__ = ["Batch", "count_into_", "launch_census", "new_buffer", "read_census"]

ALIGNMENT = 16  # bytes, for vector loads


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
        self.kept = [_aligned(tensor) for tensor in tensors]  # what the addresses point into
        self.addresses = _addresses(self.kept)
        sizes = tuple(tensor.numel() for tensor in tensors)
        self.plan = _plan(sizes, tuple(KINDS[tensor.dtype] for tensor in tensors), self.device)

    @property
    def cells(self) -> int:
        """Of the table: a row for each tensor."""
        return len(self.plan.chunks) * SINGLE.columns


def launch_census(tensors: Sequence[Tensor]) -> Callable[[], list[Census]]:
    """Count tensors of one device in one launch; returns what fetches the result."""
    batch = Batch(tensors)
    buffer = new_buffer(batch)
    count_into_(buffer, batch)
    # Memory is reused in the stream's order, so the gradients may go now; an unread result must not hold them.
    batch.kept.clear()
    counted = torch.cuda.current_stream(batch.device).record_event() if batch.device.type == "cuda" else None

    def fetch() -> list[Census]:
        if counted is not None:  # whoever asks may be on another stream
            torch.cuda.current_stream(batch.device).wait_event(counted)
        return read_census(buffer, batch)

    return fetch


def new_buffer(batch: Batch) -> Tensor:
    """All results in one, rows first and then the chunks' sums of squares, so that fetching is one copy."""
    return torch.zeros(batch.cells + len(batch.plan.owners), dtype=torch.int64, device=batch.device)


def count_into_(buffer: Tensor, batch: Batch) -> None:
    """Launch the count; the buffer must be cleared."""
    plan = batch.plan
    if not len(plan.owners):
        return
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(batch.device) if batch.device.type == "cuda" else nullcontext():
        kernel.census_kernel[(len(plan.owners),)](
            batch.addresses, plan.sizes, plan.kinds, plan.first_chunks, plan.owners,
            buffer, buffer[batch.cells :].view(torch.float64), ROW=SINGLE.columns,
            HAS_FP32=0 in plan.present, HAS_BF16=1 in plan.present, HAS_FP16=2 in plan.present,
            CHUNK=kernel.CHUNK, BLOCK=kernel.BLOCK, SLOW_BLOCK=kernel.SLOW_BLOCK, PTX=batch.has_ptx,
            num_warps=kernel.WARPS,
        )  # fmt: skip


def read_census(buffer: Tensor, batch: Batch) -> list[Census]:
    """Fetch a buffer, which waits for the device, and read the censuses in the tensors' order."""
    host = buffer.cpu()
    skipped, table = _trimmed(host[: batch.cells].view(-1, SINGLE.columns))
    sums = iter(host[batch.cells :].view(torch.float64).tolist())
    # In the order of the chunks, so that the sum is the same in every run.
    totals = (math.fsum(islice(sums, chunks)) for chunks in batch.plan.chunks)
    return [SINGLE.census(row, total, skipped) for row, total in zip(table.tolist(), totals, strict=True)]


def _trimmed(table: Tensor) -> tuple[int, Tensor]:
    """The table without the lowest and highest binades that no tensor has, which are most of them."""
    used = table[:, BINADES:].any(0).nonzero().flatten().tolist() or [0]
    return used[0], torch.cat([table[:, :BINADES], table[:, BINADES + used[0] : BINADES + used[-1] + 1]], dim=1)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    # Pinned, so that the copy does not wait; torch keeps the page until the copy is done.
    addresses = [tensor.data_ptr() for tensor in tensors]
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
