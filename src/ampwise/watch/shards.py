"""Gradients that are sharded over ranks: each rank counts its own shards, and the first rank adds up what it is sent.

Counts go through the store of torch.distributed and never through a collective: if the watch is missing on a rank, or
has failed there, the others lose some numbers, but wait for nothing.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor

from ampwise.numbers.census.algebra import Census
from ampwise.watch.inspection import parameters_of

__all__ = ["ShardCounts", "ShardExchange", "ShardGroup", "is_counted", "is_read", "local_gradient", "shard_group"]

# Ranks count at the same steps, whatever time it takes on each; every step at the start, as most mistakes show there.
READ_FIRST = 32
READ_EVERY = 8
COUNTED_EVERY = 128
MOST_UNSENT = 16  # of steps, until the first rank listens
PATIENCE_S = 0.5  # for numbers of other ranks, where something needs them now


def is_read(step: int, every: int | None) -> bool:
    """Return whether ranks read the gradients of this step."""
    return every is not None or step <= READ_FIRST or step % READ_EVERY == 0


def is_counted(step: int, every: int | None) -> bool:
    """Return whether ranks also count them by parameter."""
    return step.bit_count() == 1 or step % (every or COUNTED_EVERY) == 0


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Who counts which of an optimizer's gradients."""

    ranks: tuple[int, ...]  # that have shards; the first adds them up
    rank: int  # this one
    owned: tuple[bool | None, ...]  # whether this rank counts the gradient of a parameter; None: there is no gradient

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def weights(self) -> tuple[float, ...]:
        """What the totals of each gradient count here."""
        return tuple([float(owned) for owned in self.owned if owned is not None])


def shard_group(optimizer: Any) -> ShardGroup | None:
    """Return who counts an optimizer's gradients; None if they are not sharded, or not summed over ranks yet.

    Where several ranks have the same shard, as with replicas, the first of them counts it; so with plain gradients,
    which are the same on all ranks.
    """
    gradients = [each.grad for each in parameters_of(optimizer)]
    sharded = [each for each in gradients if hasattr(each, "placements")]
    if not sharded or any(placement.is_partial() for each in sharded for placement in each.placements):
        return None
    rank, meshes = dist.get_rank(), {id(each.device_mesh): each.device_mesh for each in sharded}
    ranks = tuple(sorted({number for mesh in meshes.values() for number in mesh.mesh.flatten().tolist()}))
    here = {key: mesh.get_coordinate() for key, mesh in meshes.items()}

    def owns(gradient: Any) -> bool | None:
        if gradient is None:
            return None
        if not hasattr(gradient, "placements"):
            return bool(rank == ranks[0])
        place: Sequence[int] | None = here[id(gradient.device_mesh)]
        return place is not None and not any(
            at for at, each in zip(place, gradient.placements, strict=True) if each.is_replicate()
        )

    return ShardGroup(ranks, rank, tuple(map(owns, gradients)))


def local_gradient(gradient: Any) -> Tensor | None:
    """Return this rank's part of a gradient."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.detach().to_local()
    if hasattr(gradient, "trigger_wait"):
        gradient = gradient.trigger_wait()
    return gradient  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCounts:
    """Counts of some shards: totals (sum of squares, infinities, NaNs), and a census by parameter in some steps."""

    totals: Sequence[float]
    layers: Mapping[int, Census]

    @classmethod
    def over(cls, parts: Sequence[ShardCounts]) -> ShardCounts:
        """Add up the counts of several ranks."""
        layers: dict[int, Census] = {}
        for part in parts:
            for index, census in part.layers.items():
                layers[index] = layers.get(index, Census()) + census
        totals = [sum(numbers) for numbers in zip(*(part.totals for part in parts), strict=True)]
        return cls(totals=totals, layers=dict(sorted(layers.items())))

    def as_text(self) -> str:
        layers = {index: census.as_dict() for index, census in self.layers.items()}
        return json.dumps({"totals": list(self.totals), "layers": layers})

    @classmethod
    def from_text(cls, text: str) -> ShardCounts:
        data = json.loads(text)
        layers = {int(index): Census.from_dict(census) for index, census in data["layers"].items()}
        return cls(totals=data["totals"], layers=layers)


class ShardExchange:
    """Sends counts of shards to the rank that adds them up, and collects them there."""

    def __init__(self) -> None:
        # Kept, as a script may destroy its process group before the last numbers have arrived.
        self._store: Any = None
        self._address = ""  # of this exchange, if its rank adds up: another than that of an earlier watch
        self._unsent: deque[tuple[str, str]] = deque(maxlen=MOST_UNSENT)
        self._broken = False
        self.incomplete = 0  # steps of which some rank has sent nothing

    def open(self, group: ShardGroup) -> None:
        """Connect, and if this rank adds up, say where it listens."""
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else self._store
        if store is self._store:
            return
        self._store, self._broken = store, False
        if group.leads and len(group.ranks) > 1:
            self._address = f"ampwise/{uuid4().hex}"
            store.set(_entry(group), self._address)

    def send(self, group: ShardGroup, optimizer: int, step: int, counts: ShardCounts) -> None:
        """Send this rank's counts of a step to the rank that adds them up; it may not listen yet, or never."""
        if self._broken:
            return
        self._unsent.append((f"{optimizer}/{step}/{group.rank}", counts.as_text()))
        try:
            self.open(group)
            if self._store.check([_entry(group)]):
                address = self._store.get(_entry(group)).decode()
                while self._unsent:
                    key, text = self._unsent.popleft()
                    self._store.set(f"{address}/{key}", text)
        except RuntimeError:  # the process with the store has ended
            self._broken = True

    def collect(
        self, group: ShardGroup, optimizer: int, step: int, own: ShardCounts, *, wait: bool
    ) -> ShardCounts | None:
        """Return the counts of all ranks; None if some have not arrived. wait: for a short time."""
        if len(group.ranks) == 1:
            return own
        if self._broken:
            return None
        deadline = time.monotonic() + (PATIENCE_S if wait else 0.0)
        try:
            self.open(group)
            keys = [f"{self._address}/{optimizer}/{step}/{rank}" for rank in group.ranks[1:]]
            while not self._store.check(keys):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.001)
            parts = [ShardCounts.from_text(self._store.get(key).decode()) for key in keys]
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError:
            self._broken = True
            return None
        return ShardCounts.over([own, *parts])

    def not_measured(self) -> list[str]:
        """Return a sentence on the steps that were not counted, if there are any."""
        if not self.incomplete:
            return []
        return [
            f"Gradients of {self.incomplete} step{'s' * (self.incomplete != 1)} were not counted: some rank that has "
            "shards of them sent no counts. They are counted if every rank is watched."
        ]


def _entry(group: ShardGroup) -> str:
    """Return the key under which the rank that adds up says where it listens."""
    return f"ampwise/shards/{group.ranks[0]}"
