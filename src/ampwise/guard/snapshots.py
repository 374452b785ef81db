"""Snapshots of the state in memory, which a rollback restores in milliseconds.

On a GPU, tensors are copied in the background: weights and optimizer state do not change until the next update, so the
copies run during the next forward and backward pass, and the update waits for them. Tensors that a forward pass changes
are copied before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.guard.state import LiveState
from ampwise.trace.value_ranges import local_shard

PLACES = ("host", "device")


@dataclass(slots=True, eq=False)
class MemorySnapshot:
    """Copy of the training state after a step."""

    step: int
    values: dict[str, Tensor]  # this rank's part of each tensor, by name
    plain: dict[str, Any]
    good: bool = False  # enough healthy steps came after it
    held: bool = False  # it is being written to disk
    copied: Any = None  # event that fires when the copies are done
    sources: list[Tensor] = field(default_factory=list)  # temporary copies on the device

    def wait(self) -> None:
        """Wait until the values are copied."""
        copied = self.copied  # read once: the thread that writes the snapshot to disk waits, too
        if copied is not None:
            copied.synchronize()
            self.copied, self.sources = None, []


class MemorySnapshots:
    """The last good snapshot, newer ones, and buffers for reuse.

    place: "host" for pinned host memory, or "device", which is faster and takes device memory.
    """

    def __init__(self, device: torch.device, place: str) -> None:
        if place not in PLACES:
            raise BadInput(f"Guard(snapshots_on={place!r}): expected 'host' or 'device'.")
        self._device, self._place = device, place
        self._kept: list[MemorySnapshot] = []  # oldest first
        self._spare: list[dict[str, Tensor]] = []
        self._copying: list[MemorySnapshot] = []
        self._stream: Any = None

    def take(self, step: int, live: LiveState) -> MemorySnapshot:
        """Take a snapshot. On a GPU, ``before_update`` must be called before the state changes."""
        found = {name: local_shard(tensor).detach() for name, tensor in live.tensors.items()}
        used = self._spare.pop() if self._spare else {}
        buffers = {name: _buffer(used.get(name), tensor, self._place) for name, tensor in found.items()}
        taken = MemorySnapshot(step, buffers, live.plain)
        if self._device.type == "cuda":
            for name in live.moving:
                found[name] = found[name].clone()
                taken.sources.append(found[name])
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                _copy(found, taken.values)
                taken.copied = torch.cuda.Event()
                taken.copied.record()
            self._copying.append(taken)
        else:
            _copy(found, taken.values)
        self._kept.append(taken)
        return taken

    def before_update(self) -> None:
        """Make the update wait for running copies on the device, without a host sync."""
        if self._copying:
            now = torch.cuda.current_stream(self._device)
            for taken in self._copying:
                copied = taken.copied
                if copied is not None:
                    now.wait_event(copied)
            self._copying.clear()

    @property
    def kept(self) -> list[MemorySnapshot]:
        """All snapshots, oldest first."""
        return list(self._kept)

    @property
    def good(self) -> MemorySnapshot | None:
        """The last snapshot that is known to be good."""
        return next((each for each in reversed(self._kept) if each.good), None)

    @property
    def candidates(self) -> list[MemorySnapshot]:
        """Snapshots that are not known to be good, oldest first."""
        return [each for each in self._kept if not each.good]

    def promote(self, snapshot: MemorySnapshot) -> None:
        """Mark a snapshot as good, and drop all earlier ones."""
        snapshot.good = True
        for earlier in self._kept[: self._kept.index(snapshot)]:
            self.drop(earlier)

    def drop(self, snapshot: MemorySnapshot) -> None:
        if snapshot in self._kept:
            self._kept.remove(snapshot)
            if not snapshot.held:
                self._reuse(snapshot)

    def drop_after(self, step: int) -> None:
        """Drop snapshots of later steps, which were undone."""
        for later in [each for each in self._kept if each.step > step]:
            self.drop(later)

    def release(self, snapshot: MemorySnapshot) -> None:
        """Release a snapshot that has been written to disk, or has failed to be."""
        snapshot.held = False
        if snapshot not in self._kept:
            self._reuse(snapshot)

    def _reuse(self, snapshot: MemorySnapshot) -> None:
        snapshot.wait()
        self._spare.append(snapshot.values)


def _buffer(used: Tensor | None, tensor: Tensor, place: str) -> Tensor:
    """Return a buffer for a copy: that of a dropped snapshot, if it fits."""
    on_host = tensor.device.type == "cpu" or place == "host"
    fits = used is not None and used.shape == tensor.shape and used.dtype == tensor.dtype
    if fits and used is not None and (used.device.type == "cpu") == on_host:
        return used
    if on_host:
        pinned = tensor.device.type == "cuda"
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _copy(found: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in found.items():
            buffers[name].copy_(tensor, non_blocking=True)
