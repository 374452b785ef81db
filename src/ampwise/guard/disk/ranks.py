"""Ranks that do something together: if it fails on one, all of them learn of it, and none waits for another."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ampwise.errors import AmpwiseError, BadInput

__all__ = ["NotSaved", "checked_together", "explained", "rank_in", "size_of"]

Result = TypeVar("Result")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NotSaved(AmpwiseError, OSError):
    """A checkpoint could not be written. Those that were there still are; ``errno`` is the system's own."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number  # without the text beside it, which would make Python show both


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def checked_together(group: dist.ProcessGroup | None, check: Callable[[], Result]) -> list[Result]:
    """What a check has found on each rank; an AmpwiseError on one of them is raised on all, the first by rank."""
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


def explained(error: BaseException, what: str, group: dist.ProcessGroup | None) -> Exception:
    """What a person understands, of what torch.distributed.checkpoint made of an error on any rank."""
    cause, where = error, ""
    while isinstance(cause, CheckpointException) and cause.failures:
        rank = min(cause.failures)
        cause, where = cause.failures[rank][0], _on(rank, group)
    if isinstance(cause, AmpwiseError):
        kind = type(cause) if isinstance(cause, BadInput) else BadInput
        return kind(f"{what}: {where}{cause}")
    if isinstance(cause, OSError):
        return NotSaved(f"{what}: {where}{cause.strerror or cause}. {_way_out(cause.errno)}", cause.errno)
    first_line = (str(cause).strip().splitlines() or [""])[0]
    return NotSaved(f"{what}: {where}{type(cause).__name__}: {first_line[:300]}")


def _on(rank: int, group: dist.ProcessGroup | None) -> str:
    return f"on rank {rank}, " if size_of(group) > 1 else ""


def _way_out(number: int | None) -> str:
    if number in NO_ROOM:
        return "Free some room, or name another folder."
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "Name a folder that may be written to."
    return "Name another folder."
