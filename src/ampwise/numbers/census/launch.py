"""Launch the census kernel: table of addresses, plan of chunks, buffer for the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor

from ampwise.numbers.census import kernel
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.census.count_row import BINADES, SINGLE
from ampwise.numbers.census.flat_values import DTYPE_CODES
from ampwise.numbers.census.kernels import ALIGNMENT

COLUMNS = SINGLE.columns
HERE = nullcontext()
MOST_COMPILED = 256  # kinds of arguments for which a kernel is kept
# Before 3.4 a compiled kernel took its arguments without constants.
DIRECT_LAUNCHES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Which chunk belongs to which tensor. It depends only on sizes and dtypes, so it is made once per model."""

    sizes: Tensor
    kinds: Tensor
    first_chunks: Tensor
    owners: Tensor
    chunks: tuple[int, ...]  # per tensor
    present: frozenset[int]  # kinds that occur
    programs: int  # chunks of all tensors
    cells: int  # of the table, which has a row for each tensor


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
        programs=len(owners),
        cells=len(sizes) * COLUMNS,
    )


class TensorBatch:
    """Contiguous tensors of one device, ready to be read by the kernel any number of times."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self.has_ptx = self.device.type == "cuda" and torch.version.hip is None
        self.kept = list(tensors)  # what the addresses point into
        self.copied: list[int] = []  # those not aligned, which are read from a copy
        addresses = list(map(Tensor.data_ptr, tensors))
        # A capturing stream cannot be waited for outside; the user of a replayed graph has to sync with it anyway.
        captured = self.device.type != "cuda" or torch.cuda.is_current_stream_capturing()
        self.stream = None if captured else _raw_stream(self.device)
        # Gradients are mostly where they were in the step before: then there is nothing to plan and to upload.
        # Comparing with the last batch takes less time than the hash that the caches below need.
        key = (addresses, list(map(Tensor.numel, tensors)), list(map(attrgetter("dtype"), tensors)))
        place = (self.device, self.stream)
        known = None if captured else _last_batches.get(place)
        if known is not None and known[0] == key:
            self.addresses, self.plan = known[1:]
            return
        for index, address in enumerate(addresses):
            if address % ALIGNMENT:
                self.copied.append(index)
                self.kept[index] = tensors[index].clone()
        self.addresses = address_table(tuple(map(Tensor.data_ptr, self.kept)), self.device)
        self.plan = plan_of(tensors)
        if not captured and not self.copied:
            _last_batches[place] = (key, self.addresses, self.plan)

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """Copy what was written to copies of unaligned tensors."""
        for index in self.copied:
            tensors[index].copy_(self.kept[index])


_last_batches: dict[tuple[torch.device, int | None], tuple[object, Tensor, ChunkPlan]] = {}  # by device and stream


class PendingCensus:
    """Counts on the device, until they are fetched."""

    def __init__(self, batch: TensorBatch, buffer: Tensor) -> None:
        # Memory is reused in stream order, so the gradients can be freed now; an unread result must not hold them.
        batch.kept.clear()
        self.batch, self.buffer = batch, buffer

    def fetch(self) -> list[Census]:
        """Copy the counts to the host, which syncs with the device."""
        if self.batch.stream is not None:  # the caller may be on another stream
            launched_on = torch.cuda.ExternalStream(self.batch.stream, device=self.batch.device)
            torch.cuda.current_stream(self.batch.device).wait_stream(launched_on)
        return read_census(self.buffer, self.batch)


def launch_census(tensors: Sequence[Tensor], scale: Tensor | None = None, *, write: bool = False) -> PendingCensus:
    """Count tensors of one device in one launch, divided by ``scale``; with ``write``, also divide them in memory."""
    batch = TensorBatch(tensors)
    buffer = new_buffer(batch)
    count_into_(buffer, batch, scale, write=write)
    if write:
        batch.write_back(tensors)
    return PendingCensus(batch, buffer)


def new_buffer(batch: TensorBatch) -> Tensor:
    """Return a cleared buffer for all results, so that fetching is one copy.

    Rows, then the chunks' sums of squares in FP64, then a count of finished chunks for kernels that need one.
    """
    return torch.zeros(batch.plan.cells + batch.plan.programs + 1, dtype=torch.int64, device=batch.device)


def count_into_(buffer: Tensor, batch: TensorBatch, scale: Tensor | None = None, *, write: bool = False) -> None:
    """Launch the count into a buffer that is cleared."""
    if batch.plan.programs:
        given, constants = census_arguments(buffer, batch, scale, write=write)
        launch(
            kernel.census_kernel, batch.plan.programs, batch.device,
            *given, batch.plan.cells, **constants, num_warps=kernel.WARPS,
        )  # fmt: skip


def census_arguments(
    buffer: Tensor, batch: TensorBatch, scale: Tensor | None, *, write: bool
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors and the constants that ``count_program`` takes."""
    plan = batch.plan
    sums = buffer.view(torch.float64)
    given = (batch.addresses, plan.sizes, plan.kinds, plan.first_chunks, plan.owners, buffer, sums)
    constants = {
        "ROW": COLUMNS, "HAS_FP32": 0 in plan.present, "HAS_BF16": 1 in plan.present, "HAS_FP16": 2 in plan.present,
        "CHUNK": kernel.CHUNK, "BLOCK": kernel.BLOCK, "SLOW_BLOCK": kernel.SLOW_BLOCK,
        "SCALED": scale is not None, "WRITE": write, "PTX": batch.has_ptx,
    }  # fmt: skip
    return (*given, buffer if scale is None else scale), constants


_compiled: dict[object, Any] = {}  # kernels by the kinds of their arguments, for ``launch``


def launch(
    kernel: Any, programs: int, device: torch.device, *given: Tensor | float, num_warps: int, **constants: Any
) -> None:
    """Launch a kernel on a device, whose constants are its last parameters.

    At every launch Triton looks into every argument for what to compile, which takes the host longer than all else a
    launch needs. So a kernel that was launched with arguments of the same kinds is called directly.
    """
    key: list[object] = [kernel, device, programs, num_warps]
    plain: list[float] = []  # addresses instead of tensors, which the launch would look into
    for each in given:
        if isinstance(each, Tensor):
            address = each.data_ptr()
            plain.append(address)
            key += (each.dtype, address % ALIGNMENT == 0)
        else:
            plain.append(each)
            key.append(each if isinstance(each, int) else float)
    key += constants.values()
    compiled = _compiled.get(tuple(key))
    with launching_on(device):
        if compiled is not None:
            compiled(*plain, *constants.values())
            return
        compiled = kernel[(programs,)](*given, num_warps=num_warps, **constants)
        if DIRECT_LAUNCHES and device.type == "cuda" and hasattr(compiled, "__getitem__"):
            assert list(kernel.signature.parameters)[len(given) :] == list(constants), "constants out of order"
            if len(_compiled) >= MOST_COMPILED:  # batches of ever other sizes
                _compiled.clear()
            _compiled[tuple(key)] = compiled[(programs, 1, 1)]


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes this the current device, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


def plan_of(tensors: Sequence[Tensor]) -> ChunkPlan:
    """Return how tensors of one device are split into chunks."""
    sizes = tuple(map(Tensor.numel, tensors))
    return _plan(sizes, tuple([DTYPE_CODES[tensor.dtype] for tensor in tensors]), tensors[0].device)


def read_census(buffer: Tensor, batch: TensorBatch) -> list[Census]:
    """Fetch a buffer, which syncs with the device, and return the censuses in the tensors' order."""
    host = buffer.cpu()
    table = host[: batch.plan.cells].view(-1, COLUMNS)
    # Without the lowest and highest binades that no tensor has, which are most of them.
    used = table[:, BINADES:].any(0).nonzero().flatten().tolist() or [0]
    skipped = used[0]
    table = torch.cat([table[:, :BINADES], table[:, BINADES + skipped : BINADES + used[-1] + 1]], dim=1)
    sums = iter(host.view(torch.float64)[batch.plan.cells :].tolist())
    # In the order of the chunks, so that the sum is the same in every run.
    totals = (math.fsum(islice(sums, chunks)) for chunks in batch.plan.chunks)
    return [SINGLE.census(row, total, skipped) for row, total in zip(table.tolist(), totals, strict=True)]


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses in device memory, without a sync."""
    if device.type != "cuda":
        return torch.tensor(addresses, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():  # as constants of the graph: there is no host memory to keep
        table = torch.empty(len(addresses), dtype=torch.int64, device=device)
        for cell, address in zip(table, addresses, strict=True):
            cell.fill_(address)
        return table
    return _uploaded_table(addresses, device, _raw_stream(device))


def _raw_stream(device: torch.device) -> int:
    """Return the handle of the device's current stream; a Stream object takes ten times as long."""
    return int(torch._C._cuda_getCurrentRawStream(device.index or 0))


# Gradients are mostly at the same addresses as in the step before: then there is nothing to upload.
@lru_cache(maxsize=32)
def _uploaded_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Upload addresses in stream order; the stream is part of the cache key."""
    # Pinned, so that the copy does not sync; torch keeps the page until the copy is done.
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=True)
    return table.to(device, non_blocking=True)
