"""Replays on several ranks: all ranks replay a step together, or one does alone, without collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.numbers.op_families import is_collective

__all__ = ["CollectiveInReplay", "RankGroup", "collectives_refused", "is_multi_rank"]

T = TypeVar("T")


class RankGroup:
    """The ranks of a process group, or a single rank where there is no group.

    in_step: the passes contain collectives (sharded weights, synchronized statistics), so that every rank must run
    as many passes as the others, even if its own part was finite.
    """

    def __init__(self, group: Any = None, *, several: bool = False, in_step: bool = False) -> None:
        self._group, self.several, self.in_step = group, several, in_step
        self.rank = dist.get_rank(group) if several else None
        self.size = dist.get_world_size(group) if several else 1

    def with_collectives(self, found: bool) -> RankGroup:
        """Return this group, in step if a pass of any rank contained collectives, for example in the loss function."""
        in_step = self.several and any(self.all_of(self.in_step or found))
        return RankGroup(self._group, several=self.several, in_step=in_step)

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


class CollectiveInReplay(Exception):
    """The replayed code calls a collective, and the other ranks do not replay."""


def is_multi_rank() -> bool:
    """Return whether torch.distributed runs with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def collectives_refused() -> AbstractContextManager[Any]:
    """Return a context in which collectives raise, since they would wait forever; it does nothing on a single rank."""
    return _RefuseCollectives() if is_multi_rank() else nullcontext()  # type: ignore[no-untyped-call]


class _RefuseCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(str(func)):
            raise CollectiveInReplay("the model calls a collective, and the other ranks do not replay it")
        return func(*args, **(kwargs or {}))
