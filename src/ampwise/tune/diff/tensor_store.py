"""Keep the first side's tensors until the second side's are compared with them, within a memory budget.

They are kept by reference, and copied only before something writes into their memory. Those that exceed the budget of
their device are moved to the host. The budget lets the peak exceed that of a plain step by at most a quarter. The peak
is read while the first side runs, at each operation with a large result: the allocator's statistics are not reset, as
the user may rely on them. Without such statistics, the bytes saved for the backward pass are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.trace.recorder import storage_id, tensors_in
from ampwise.trace.value_ranges import readable_values
from ampwise.tune.diff.statistics import UNSCALED, Factors, Ledger

MORE = 1.25  # of a plain step's peak; the promise is 1.3, as an estimate misses something
LEAST = 2**26  # bytes that do not count


class BatchRows(NamedTuple):
    """The rows of the batch that a run is computing, if it computes them in several parts."""

    first: int
    number: int
    total: int


class TensorStore:
    """Kept tensors by key. ``budget`` returns the bytes of the device that may be used; called for each tensor."""

    def __init__(self, budget: Callable[[], float]) -> None:
        self._budget = budget
        self._kept: dict[Any, Tensor] = {}
        self._by_storage: dict[int, set[Any]] = {}
        self.on_device = 0  # bytes
        self.moved = 0  # bytes that went to the host

    def __contains__(self, key: Any) -> bool:
        return key in self._kept

    def __getitem__(self, key: Any) -> Tensor:
        return self._kept[key]

    def fits(self, tensor: Tensor) -> bool:
        """Whether the budget allows keeping it on its device."""
        taken = _bytes_on_device(tensor)
        return not taken or storage_id(tensor) in self._by_storage or self.on_device + taken <= self._budget()

    def put(self, key: Any, tensor: Tensor) -> None:
        """Keep a tensor with its current values."""
        storage = storage_id(tensor)
        if not self.fits(tensor):
            self._kept[key] = tensor.to("cpu", copy=True)
            self.moved += tensor.nbytes
            return
        if storage not in self._by_storage:
            self.on_device += _bytes_on_device(tensor)
        self._kept[key] = tensor
        self._by_storage.setdefault(storage, set()).add(key)

    def before_write(self, tensor: Tensor) -> None:
        """Copy the kept tensors that share this tensor's memory, before it is written."""
        storage = storage_id(tensor)
        copies = {key: self._kept[key].clone() for key in self._by_storage.get(storage, ())}
        for key, copy in copies.items():
            self.drop(key)
            self.put(key, copy)

    def drop(self, key: Any) -> None:
        """Remove a tensor."""
        tensor = self._kept.pop(key)
        storage = storage_id(tensor)
        keys = self._by_storage.get(storage)
        if keys is None:  # a copy on the host
            return
        keys.discard(key)
        if not keys:
            del self._by_storage[storage]
            self.on_device -= _bytes_on_device(tensor)


class SlotComparison:
    """Compares another run's tensors with the kept ones; ``last`` drops each after its comparison."""

    def __init__(self, kept: TensorStore, *, last: bool = True) -> None:
        self.kept, self._last = kept, last
        self.ledger = Ledger()
        self.unlike: dict[int, str] = {}  # slots whose tensors cannot be compared, and why
        self._begun: dict[int, set[int]] = {}  # first rows that were compared, where a run computes rows in parts

    def compare(
        self,
        slot: int | None,
        values: Tensor | None,
        factors: Factors = UNSCALED,
        rows: BatchRows | None = None,
    ) -> None:
        """Compare values with those of a slot, or with these rows of the batch in it, unless that was done before."""
        if slot is None or values is None or slot not in self.kept or slot in self.unlike:
            return
        kept = self.kept[slot]
        if rows is not None and kept.ndim == 0:
            return  # a sum or mean over the batch has no rows
        if rows is not None and kept.shape != values.shape:
            self._compare_rows(slot, kept, values, factors, rows)
            return
        if slot in self.ledger:
            return
        if kept.shape != values.shape:
            self.unlike[slot] = _two_shapes(kept, values)
        elif kept.is_floating_point() != values.is_floating_point():
            shown = [str(each.dtype).removeprefix("torch.") for each in (kept, values)]
            self.unlike[slot] = f"{shown[0]} in a, {shown[1]} in b"
        else:
            self.ledger.add(slot, kept, values, factors)
        if self._last and rows is None:
            self.kept.drop(slot)

    def _compare_rows(self, slot: int, kept: Tensor, values: Tensor, factors: Factors, rows: BatchRows) -> None:
        """Compare with a part of a slot: of a batch, or of rows such as tokens that were flattened with it."""
        each, left = divmod(kept.shape[0], rows.total)
        fits = not left and values.ndim and kept.shape[1:] == values.shape[1:] and values.shape[0] == each * rows.number
        if not fits or kept.is_floating_point() != values.is_floating_point():
            self.unlike[slot] = _two_shapes(kept, values)
            return
        first = rows.first * each
        if first in self._begun.setdefault(slot, set()):
            return
        self._begun[slot].add(first)
        own = kept[first : first + len(values)]
        self.ledger.add_rows(slot, tuple(kept.shape), first, own, values, factors)


def _two_shapes(a: Tensor, b: Tensor) -> str:
    shown = ["×".join(map(str, each.shape)) or "a number" for each in (a, b)]
    return f"{shown[0]} in a, {shown[1]} in b"


class MemoryBudget:
    """Memory budget on the first side's device; create it before the first run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = self._taken()
        self._own = 0  # bytes that the first side takes at its peak, beyond those allocated before

    def forward(self, saved: int) -> float:
        """Return the bytes that may be kept of a forward pass; ``saved`` is what the pass would have saved so far."""
        return MORE * (self._before + saved) - self._before + LEAST

    def beside(self, share: float, gradients: int) -> float:
        """Return the bytes that may be kept while the other side runs forward and backward.

        ``share``: the other side's memory relative to the first's; ``gradients``: bytes of its weight gradients.
        """
        peak = MORE * (self._before + self._own)
        return max(LEAST, peak - self._before - gradients - share * self._own)

    def saved(self, saved: int) -> None:
        """Note how many bytes the first side saves for its backward pass."""
        self._own = max(self._own, saved)

    def made(self, result: Any, kept: int) -> None:
        """Note the memory after an operation with this result; ``kept`` bytes are ours."""
        if self._device is None:
            return
        if any(each.layout == torch.strided and each.nbytes >= LEAST for each in results_in(result)):
            self._own = max(self._own, self._taken() - self._before - kept)

    def _taken(self) -> int:
        if self._device is None:
            return 0
        # The public function for this one number takes five times as long.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(counts["allocated_bytes"]["all"]["current"]) if counts else 0


def _bytes_on_device(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "cpu" else tensor.untyped_storage().nbytes()


def results_in(result: Any) -> list[Tensor]:
    """Return the tensors that an operation returned."""
    return list(tensors_in(result if isinstance(result, list | tuple) else (result,)))


def comparable_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values, detached; None if it has none to compare."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        tensor = tensor.detach().to_dense()
    if tensor.is_floating_point() or tensor.is_complex():
        return readable_values(tensor)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.layout == torch.strided
    return tensor.detach() if is_plain and tensor.numel() else None


def view_identity(tensor: Tensor) -> object:
    """Return what identifies a tensor within its storage, while that is kept and not written."""
    version = 0 if tensor.is_inference() else tensor._version  # inference tensors are never written here
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version
