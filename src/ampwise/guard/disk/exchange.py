"""Exchanges between ranks that read or write a checkpoint together: if one rank fails, all raise, and none waits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ampwise.errors import AmpwiseError, BadInput
from ampwise.guard.disk.manifest import DamagedCheckpoint

Local = TypeVar("Local")
Answer = TypeVar("Answer")


class CheckpointNotSaved(AmpwiseError, OSError):
    """Raised when a checkpoint cannot be written. Existing checkpoints are intact; ``errno`` is the system's."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number  # set here, because OSError(errno, text) would print both


class _Failure(NamedTuple):
    """An error, as data that can be sent to other ranks."""

    kind: type[AmpwiseError]
    text: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException, where: str) -> _Failure:
        if isinstance(error, BadInput):
            kind = DamagedCheckpoint if isinstance(error, DamagedCheckpoint) else BadInput
            return cls(kind, f"{where}{error}")
        if isinstance(error, AmpwiseError):
            return cls(BadInput, f"{where}{error}")
        if isinstance(error, OSError):
            advice = "Name another folder."
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                advice = "Free some disk space, or name another folder."
            elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
                advice = "Name a writable folder."
            return cls(CheckpointNotSaved, f"{where}{error.strerror or error}. {advice}", error.errno)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return cls(CheckpointNotSaved, f"{where}{type(error).__name__}: {first_line[:300]}")

    def error(self, what: str) -> AmpwiseError:
        text = f"{what}: {self.text}"
        return CheckpointNotSaved(text, self.errno) if self.kind is CheckpointNotSaved else self.kind(text)


class CheckpointRanks:
    """The ranks that do something together; their process group must use gloo. None: one process.

    what: what cannot be done if a rank fails; begins the message of the error, which is raised on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        self._group, self._what = group, what
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def exchange(self, local: Callable[[], Local], decide: Callable[[list[Local]], Sequence[Answer]]) -> Answer:
        """Run ``local`` on each rank, then ``decide`` on rank 0 with all results; return this rank's answer."""
        sent, raised = self._tried(local)
        everyone: list[Any] = [sent]
        if self._group is not None:
            gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
            self._communicate(lambda: dist.gather_object(sent, gathered, dst=self._first, group=self._group))
            everyone = gathered or []
        answers: list[Any] = []
        if self.rank == 0:
            decided = next((each for each in everyone if isinstance(each, _Failure)), None)
            if decided is None:
                decided, raised = self._tried(lambda: decide(everyone))
            failed = isinstance(decided, _Failure)
            answers = [decided] * self.size if failed else [[answer] for answer in decided]
        received: list[Any] = answers[:1]
        if self._group is not None:
            received, given = [None], answers or None
            self._communicate(lambda: dist.scatter_object_list(received, given, src=self._first, group=self._group))
        answer = received[0]
        if isinstance(answer, _Failure):
            raise answer.error(self._what) from raised
        (mine,) = answer
        return mine  # type: ignore[no-any-return]

    def _tried(self, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return _Failure.of(error, f"on rank {self.rank}, " if self.size > 1 else ""), error

    def _communicate(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:  # a rank is gone
            raise _Failure.of(error, "").error(self._what) from error
