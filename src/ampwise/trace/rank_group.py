"""Coordinate several ranks that replay a step together, each its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

__all__ = ["RankGroup"]

T = TypeVar("T")


class RankGroup:
    """The ranks of a process group, or a single rank where there is no group.

    in_step: the passes contain collectives (sharded weights, synchronized statistics), so that every rank must run
    as many passes as the others, even if its own part was finite.
    """

    def __init__(self, group: Any = None, *, several: bool = False, in_step: bool = False) -> None:
        self._group, self.several, self.in_step = group, several, in_step

    def with_collectives(self, found: bool) -> RankGroup:
        """Return this group, in step if a pass of any rank contained collectives, for example in the loss function."""
        in_step = self.several and any(self.all_of(self.in_step or found))
        return RankGroup(self._group, several=self.several, in_step=in_step)

    @property
    def rank(self) -> int | None:
        return dist.get_rank(self._group) if self.several else None

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if self.several else 1

    def each(self, work: Callable[[], T]) -> T:
        """Do some work on every rank. If one rank fails, all raise, so that none waits forever."""
        if not self.several:
            return work()
        result, failed = None, ""
        try:
            result = work()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        failures = self.all_of(failed)
        if any(failures):
            raise RuntimeError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(failures) if why))
        return cast("T", result)

    def all_hold(self, condition: Callable[[], bool]) -> bool:
        """Return whether a condition holds on every rank."""
        return all(self.all_of(self.each(condition)))

    def all_of(self, value: T) -> list[T]:
        """Gather the value of every rank, in rank order."""
        if not self.several:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone
