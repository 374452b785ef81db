"""One small exchange between ranks at each step: the mean loss, and whether some rank needs to save or stop.

It runs on the host, which is a step ahead of the GPU, and has a timeout: if a rank is gone, all ranks stop instead of
waiting forever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ampwise.guard.disk.manifest import DamagedCheckpoint
from ampwise.train.ranks import Ranks

T = TypeVar("T")


class LostRank(Exception):
    """Raised when another rank does not answer."""


class AgreedStep(NamedTuple):
    """Result of the exchange, the same on all ranks."""

    loss: float  # mean over ranks
    due: bool  # a checkpoint is due, as rank 0 decides
    busy: bool  # some rank is still writing the last checkpoint
    ends: bool  # some rank received a signal to stop


class RankAgreement:
    """Exchange of values between the ranks that train a model together; a no-op for a single process."""

    def __init__(self, ranks: Ranks, patience: float) -> None:
        self.distributed = ranks.several
        self.saving: Any = None  # a process group for the thread that writes checkpoints
        # A separate group for reading: a rank that alone fails to read continues with the next exchange. In a shared
        # group, the others would take that for a part of theirs, and resume from a different checkpoint.
        self.reading: Any = None
        self._group: Any = None
        if self.distributed:
            self._group = _new_group(ranks.process_group, patience)
            self.saving = _new_group(ranks.process_group, patience)
            self.reading = _new_group(ranks.process_group, patience)
        self.rank = dist.get_rank(self._group) if self.distributed else 0
        self.size = dist.get_world_size(self._group) if self.distributed else 1

    def agree(self, loss: float, *, due: bool, busy: bool, ends: bool) -> AgreedStep:
        if not self.distributed:
            return AgreedStep(loss, due, busy, ends)
        values = torch.tensor([loss, due and self.rank == 0, busy, ends], dtype=torch.float64)
        self._exchange(lambda: dist.all_reduce(values, group=self._group))
        total, due_, busy_, ends_ = values.tolist()
        return AgreedStep(total / self.size, due_ > 0, busy_ > 0, ends_ > 0)

    def worst(self, number: int) -> int:
        """Return the largest number of all ranks."""
        shared = torch.tensor(number)
        self._exchange(lambda: dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group))
        return int(shared)

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order."""
        if not self.distributed:
            return [value]
        everyone: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(everyone, value, group=self._group))
        return everyone

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        return self.gather(value)[0]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank. If it fails on one, raise on all, with the message of the first that failed."""
        error: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as failure:
            error = failure
        failure_here = (
            None if error is None else (isinstance(error, DamagedCheckpoint), type(error).__name__, str(error))
        )
        failures = {rank: failed for rank, failed in enumerate(self.gather(failure_here)) if failed is not None}
        if not failures:
            return result  # type: ignore[return-value]
        # After Damaged, the caller tries another checkpoint: all ranks must do so, or none.
        damaged = [rank for rank, failed in failures.items() if failed[0]]
        if error is not None and (isinstance(error, DamagedCheckpoint) or not damaged):
            raise error
        if damaged:
            raise DamagedCheckpoint(f"rank {damaged[0]}: {failures[damaged[0]][2]}")
        rank, (_, name, message) = next(iter(failures.items()))
        raise RuntimeError(f"rank {rank}: {name}: {message}")

    def _exchange(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:  # gloo raises it when a rank is gone or the timeout is over
            raise LostRank(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _new_group(among: Any, patience: float) -> Any:
    timeout = timedelta(seconds=patience)
    if among is None or dist.get_world_size(among) == dist.get_world_size():
        return dist.new_group(backend="gloo", timeout=timeout)
    ranks = dist.get_process_group_ranks(among)
    return dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
