"""Operations that all ranks do together: if one rank fails, all raise, and none waits for another."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ampwise.errors import AmpwiseError, BadInput

__all__ = ["CheckpointNotSaved", "checked_together", "rank_in", "readable_error", "size_of"]

Result = TypeVar("Result")
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointNotSaved(AmpwiseError, OSError):
    """Raised when a checkpoint cannot be written. Existing checkpoints are intact; ``errno`` is the system's."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number  # set here, because OSError(errno, text) would print both


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def checked_together(group: dist.ProcessGroup | None, check: Callable[[], Result]) -> list[Result]:
    """Run a check on each rank and return all results; if it raises AmpwiseError on some, raise the first on all."""
    found: Any = None
    error: AmpwiseError | None = None
    try:
        found = check()
    except AmpwiseError as raised:
        error = raised
    if group is None:
        everyone = [(found, error)]
    else:
        everyone = [(None, None)] * size_of(group)
        dist.all_gather_object(everyone, (found, error), group=group)
    for rank, (_, raised_there) in enumerate(everyone):
        if raised_there is not None:
            raise type(raised_there)(_on(rank, group) + str(raised_there)) from error
    return [each for each, _ in everyone]


def readable_error(error: BaseException, what: str, group: dist.ProcessGroup | None) -> Exception:
    """Convert an error from torch.distributed.checkpoint, on any rank, into a readable one."""
    cause, where = error, ""
    while isinstance(cause, CheckpointException) and cause.failures:
        rank = min(cause.failures)
        cause, where = cause.failures[rank][0], _on(rank, group)
    if isinstance(cause, AmpwiseError):
        kind = type(cause) if isinstance(cause, BadInput) else BadInput
        return kind(f"{what}: {where}{cause}")
    if isinstance(cause, OSError):
        return CheckpointNotSaved(f"{what}: {where}{cause.strerror or cause}. {_advice(cause.errno)}", cause.errno)
    first_line = (str(cause).strip().splitlines() or [""])[0]
    return CheckpointNotSaved(f"{what}: {where}{type(cause).__name__}: {first_line[:300]}")


def _on(rank: int, group: dist.ProcessGroup | None) -> str:
    return f"on rank {rank}, " if size_of(group) > 1 else ""


def _advice(number: int | None) -> str:
    if number in DISK_FULL:
        return "Free some disk space, or name another folder."
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "Name a writable folder."
    return "Name another folder."
