"""What all ranks know of a step, in one small exchange: its loss, and whether one of them wants something.

It goes through the host, which is a step ahead of a GPU, and has a time limit: a rank that is gone ends the training of
all, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ampwise.engine.ranks import Ranks
from ampwise.guard.disk.manifest import Damaged

__all__ = ["Agreed", "Agreement", "LostRank"]

T = TypeVar("T")


class LostRank(Exception):
    """Another rank did not answer."""


class Agreed(NamedTuple):
    """The same on all ranks."""

    loss: float  # the mean
    due: bool  # the first says that a checkpoint is
    busy: bool  # some rank is still writing the last
    ends: bool  # some rank was told to end


class Agreement:
    """Of the ranks that train a model together; or of one alone."""

    def __init__(self, ranks: Ranks, patience: float) -> None:
        self.several = ranks.several
        self.saving: Any = None  # a group of its own, for a thread that writes meanwhile
        # And one to read through: a rank that fails there alone goes on to the next question, which would otherwise
        # be taken for an answer to what the others still exchange. They would go on from different checkpoints.
        self.reading: Any = None
        self._group: Any = None
        if self.several:
            self._group = _new_group(ranks.process_group, patience)
            self.saving = _new_group(ranks.process_group, patience)
            self.reading = _new_group(ranks.process_group, patience)
        self.rank = dist.get_rank(self._group) if self.several else 0
        self.size = dist.get_world_size(self._group) if self.several else 1

    def agree(self, loss: float, *, due: bool, busy: bool, ends: bool) -> Agreed:
        if not self.several:
            return Agreed(loss, due, busy, ends)
        said = torch.tensor([loss, due and self.rank == 0, busy, ends], dtype=torch.float64)
        self._exchange(lambda: dist.all_reduce(said, group=self._group))
        total, due_, busy_, ends_ = said.tolist()
        return Agreed(total / self.size, due_ > 0, busy_ > 0, ends_ > 0)

    def all_of(self, value: T) -> list[T]:
        """What every rank says, in their order."""
        if not self.several:
            return [value]
        everyone: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(everyone, value, group=self._group))
        return everyone

    def first_says(self, value: T) -> T:
        """What the first rank says, on all of them."""
        return self.all_of(value)[0]

    def each(self, work: Callable[[], T]) -> T:
        """Some work on every rank. If it fails on one, it fails on all, with the words of the first that failed."""
        error: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as failure:
            error = failure
        told = None if error is None else (isinstance(error, Damaged), type(error).__name__, str(error))
        failures = {rank: failed for rank, failed in enumerate(self.all_of(told)) if failed is not None}
        if not failures:
            return result  # type: ignore[return-value]
        # Damaged is gone on from, with another checkpoint: by all of them, or by none.
        damaged = [rank for rank, failed in failures.items() if failed[0]]
        if error is not None and (isinstance(error, Damaged) or not damaged):
            raise error
        if damaged:
            raise Damaged(f"rank {damaged[0]}: {failures[damaged[0]][2]}")
        rank, (_, name, words) = next(iter(failures.items()))
        raise RuntimeError(f"rank {rank}: {name}: {words}")

    def _exchange(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:  # gloo's own, when a rank is gone or the time is up
            raise LostRank(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _new_group(among: Any, patience: float) -> Any:
    timeout = timedelta(seconds=patience)
    if among is None or dist.get_world_size(among) == dist.get_world_size():
        return dist.new_group(backend="gloo", timeout=timeout)
    ranks = dist.get_process_group_ranks(among)
    return dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
