"""Several ranks that replay a step together: each its own share, in step with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

__all__ = ["Together"]

T = TypeVar("T")


class Together:
    """All ranks of a group; or one alone, where there is no group.

    in_step: the pass itself has exchanges in it (sharded weights, statistics over ranks), so that every rank must run
    as many passes as the others, also those that have nothing to look for.
    """

    def __init__(self, group: Any = None, *, several: bool = False, in_step: bool = False) -> None:
        self._group, self.several, self.in_step = group, several, in_step

    def knowing(self, *, exchanges: bool) -> Together:
        """The same, in step if a pass was seen to have exchanges in it on some rank: a loss function has its own."""
        in_step = self.several and any(self.all_of(self.in_step or exchanges))
        return Together(self._group, several=self.several, in_step=in_step)

    @property
    def rank(self) -> int | None:
        return dist.get_rank(self._group) if self.several else None

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if self.several else 1

    def each(self, work: Callable[[], T]) -> T:
        """Do some work on every rank. If one fails, all do: nobody waits for it."""
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

    def all_hold(self, question: Callable[[], bool]) -> bool:
        """Whether it is so on every rank."""
        return all(self.all_of(self.each(question)))

    def all_of(self, value: T) -> list[T]:
        """What every rank says, in their order."""
        if not self.several:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone
