"""Sum gradient totals over the ranks that hold parts of the same gradients, in one small all-reduce.

Every rank contributes its sum of squares and its counts of infinities and NaNs. A gradient replicated on several ranks
is weighted by each in proportion, so that a plain sum over all ranks gives the totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput

__all__ = ["NO_REDUCTION", "RankReduction", "make_reduction"]


@dataclass(frozen=True, slots=True)
class RankReduction:
    """Process groups over which totals are summed, and the weight of each gradient on this rank."""

    groups: tuple[Any, ...] = ()
    device_type: str = ""  # the device type that the groups communicate on; "" for any
    weights: tuple[float, ...] | None = None

    def reach(self, totals: Tensor) -> Tensor:
        """Return the totals over all ranks, the same on each."""
        if not self.groups:
            return totals
        here = totals.device
        shared = totals if self.device_type in ("", here.type) else totals.to(self.device_type)
        for group in self.groups:
            dist.all_reduce(shared, group=group)
        return shared.to(here)


NO_REDUCTION = RankReduction()


def make_reduction(count: int, shards: Mapping[int, Any], process_group: Any | None) -> RankReduction:
    """Return the reduction for ``count`` gradients, of which those in ``shards`` are DTensors.

    Plain gradients are taken to be the same on every rank, as DDP leaves them; with a ``process_group``, to be
    sharded over its ranks.
    """
    if process_group is not None:
        ranks = dist.get_world_size(process_group)
        weights = [_shards(shards[i]) / ranks if i in shards else 1.0 for i in range(count)]
        return RankReduction((process_group,), "", tuple(weights))
    if not shards:
        return NO_REDUCTION
    mesh = _common_mesh([shard.device_mesh for shard in shards.values()])
    weights = [(_shards(shards[i]) if i in shards else 1) / mesh.size() for i in range(count)]
    if mesh.size() == dist.get_world_size():
        return RankReduction((None,), mesh.device_type, tuple(weights))
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return RankReduction(groups, mesh.device_type, tuple(weights))


def _shards(gradient: Any) -> int:
    """Return how many different shards a DTensor has."""
    dimensions = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    # Not is_shard(): it is False for a shard of a shard, as in FSDP over tensor parallelism.
    return prod(size for size, placement in dimensions if not placement.is_replicate())


def _common_mesh(meshes: Sequence[Any]) -> Any:
    """Return the mesh to sum over: the only one, or one that spans all ranks."""
    first = meshes[0]
    if all(mesh == first for mesh in meshes):
        return first
    everyone = [mesh for mesh in meshes if mesh.size() == dist.get_world_size()]
    if not everyone:
        raise BadInput(
            "the gradients of this optimizer are on several device meshes, none of which spans all ranks. "
            "Name the ranks to sum over: GradScaler(process_group=...)."
        )
    return everyone[0]
