"""Snapshots in memory, to go back to in milliseconds.

On a GPU, tensors are copied beside the training: weights and the states of optimizers stand still until the next
update, so that the copies run during the next forward and backward pass, and the update waits for them. What a forward
pass changes is copied before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.guard.state import Live
from ampwise.trace.ranges import local

__all__ = ["PLACES", "Snapshot", "Snapshots"]

PLACES = ("host", "device")


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after a step."""

    step: int
    values: dict[str, Tensor]  # this rank's part of each tensor, by name
    plain: dict[str, Any]
    good: bool = False  # enough healthy steps came after it
    held: bool = False  # it is being written to disk
    copied: Any = None  # an event: the copies are done
    sources: list[Tensor] = field(default_factory=list)  # copies on the device on their way to the host

    def wait(self) -> None:
        """Until the values are there."""
        copied = self.copied  # once: the thread that writes it waits, too
        if copied is not None:
            copied.synchronize()
            self.copied, self.sources = None, []


class Snapshots:
    """The last that is known to be good, those after it, and memory that is used again.

    place: "host", in memory that the GPU copies to by itself, or "device", which is faster and takes its memory.
    """

    def __init__(self, device: torch.device, place: str) -> None:
        if place not in PLACES:
            raise BadInput(f"Guard(snapshots_on={place!r}): 'host' or 'device' is expected.")
        self._device, self._place = device, place
        self._kept: list[Snapshot] = []  # oldest first
        self._spare: list[dict[str, Tensor]] = []
        self._copying: list[Snapshot] = []
        self._stream: Any = None

    def take(self, step: int, live: Live) -> Snapshot:
        """The state as it is now. On a GPU, ``before_update`` must be called before it changes."""
        found = {name: local(tensor).detach() for name, tensor in live.tensors.items()}
        taken = Snapshot(step, self._memory(found), live.plain)
        if self._device.type == "cuda":
            self._copy_beside(taken, found, live.moving)
        else:
            _copy(found, taken.values)
        self._kept.append(taken)
        return taken

    def _copy_beside(self, taken: Snapshot, found: Mapping[str, Tensor], moving: Iterable[str]) -> None:
        still = dict(found)
        for name in moving:
            still[name] = found[name].clone()
            taken.sources.append(still[name])
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            _copy(still, taken.values)
            taken.copied = torch.cuda.Event()
            taken.copied.record()
        self._copying.append(taken)

    def before_update(self) -> None:
        """The update waits for copies, and the host does not."""
        if self._copying:
            now = torch.cuda.current_stream(self._device)
            for taken in self._copying:
                copied = taken.copied
                if copied is not None:
                    now.wait_event(copied)
            self._copying.clear()

    def _memory(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For copies: what an earlier snapshot had, where it fits."""
        used = self._spare.pop() if self._spare else {}
        return {name: _room(used.get(name), tensor, self._place) for name, tensor in found.items()}

    @property
    def kept(self) -> list[Snapshot]:
        """All of them, oldest first."""
        return list(self._kept)

    @property
    def good(self) -> Snapshot | None:
        """The last that is known to be good."""
        return next((each for each in reversed(self._kept) if each.good), None)

    @property
    def candidates(self) -> list[Snapshot]:
        """Those that are not known to be, oldest first."""
        return [each for each in self._kept if not each.good]

    def promote(self, snapshot: Snapshot) -> None:
        """It is known to be good: none before it is needed any more."""
        snapshot.good = True
        for earlier in self._kept[: self._kept.index(snapshot)]:
            self.drop(earlier)

    def drop(self, snapshot: Snapshot) -> None:
        if snapshot in self._kept:
            self._kept.remove(snapshot)
            if not snapshot.held:
                self._reuse(snapshot)

    def drop_after(self, step: int) -> None:
        """Those of steps that were undone."""
        for later in [each for each in self._kept if each.step > step]:
            self.drop(later)

    def release(self, snapshot: Snapshot) -> None:
        """It is on disk, or never will be."""
        snapshot.held = False
        if snapshot not in self._kept:
            self._reuse(snapshot)

    def _reuse(self, snapshot: Snapshot) -> None:
        snapshot.wait()
        self._spare.append(snapshot.values)

    @property
    def bytes(self) -> int:
        """Memory that they take, with what is kept to be used again."""
        held = [each.values for each in self._kept] + self._spare
        return sum(tensor.nbytes for values in held for tensor in values.values())


def _room(used: Tensor | None, tensor: Tensor, place: str) -> Tensor:
    on_host = tensor.device.type == "cpu" or place == "host"
    fits = used is not None and used.shape == tensor.shape and used.dtype == tensor.dtype
    if fits and used is not None and (used.device.type == "cpu") == on_host:
        return used
    if on_host:
        pinned = tensor.device.type == "cuda"
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _copy(found: Mapping[str, Tensor], room: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in found.items():
            room[name].copy_(tensor, non_blocking=True)
