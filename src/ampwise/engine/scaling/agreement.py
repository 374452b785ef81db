"""Ranks that hold parts of the same gradients agree on what was read, in one small reduction.

Every rank brings its sum of squares and its counts of infinities and NaNs. A gradient that several ranks hold
alike is counted by each of them in proportion, so that a plain sum over all ranks gives the totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput

__all__ = ["ALONE", "Agreement", "agreement_on"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over which groups of ranks totals are summed, and how much each gradient counts on this one."""

    groups: tuple[Any, ...] = ()
    device_type: str = ""  # where the groups communicate, if not everywhere
    weights: tuple[float, ...] | None = None

    def reach(self, totals: Tensor) -> Tensor:
        """The totals over all ranks, the same on each."""
        if not self.groups:
            return totals
        here = totals.device
        shared = totals if self.device_type in ("", here.type) else totals.to(self.device_type)
        for group in self.groups:
            dist.all_reduce(shared, group=group)
        return shared.to(here)


ALONE = Agreement()


def agreement_on(count: int, shards: Mapping[int, Any], process_group: Any | None) -> Agreement:
    """Who has to agree on ``count`` gradients, of which those in ``shards`` are DTensors.

    Plain gradients are taken to be the same on every rank, as DDP leaves them; with a ``process_group``, to be
    divided among its ranks.
    """
    if process_group is not None:
        ranks = dist.get_world_size(process_group)
        weights = [_shards(shards[i]) / ranks if i in shards else 1.0 for i in range(count)]
        return Agreement((process_group,), "", tuple(weights))
    if not shards:
        return ALONE
    mesh = _common_mesh([shard.device_mesh for shard in shards.values()])
    weights = [(_shards(shards[i]) if i in shards else 1) / mesh.size() for i in range(count)]
    if mesh.size() == dist.get_world_size():
        return Agreement((None,), mesh.device_type, tuple(weights))
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return Agreement(groups, mesh.device_type, tuple(weights))


def _shards(gradient: Any) -> int:
    """Into how many different pieces a DTensor is cut."""
    dimensions = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    # Not is_shard(): a shard of a shard, as FSDP over tensor parallelism has it, does not call itself one.
    return prod(size for size, placement in dimensions if not placement.is_replicate())


def _common_mesh(meshes: Sequence[Any]) -> Any:
    """The mesh whose ranks must agree: the only one, or one that spans all ranks."""
    first = meshes[0]
    if all(mesh == first for mesh in meshes):
        return first
    everyone = [mesh for mesh in meshes if mesh.size() == dist.get_world_size()]
    if not everyone:
        raise BadInput(
            "the gradients of this optimizer lie on several device meshes, none of which spans all ranks. "
            "Say who has to agree: GradScaler(process_group=...)."
        )
    return everyone[0]
