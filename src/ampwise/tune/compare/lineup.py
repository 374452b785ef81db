"""The contenders that are still there, and why the others are not: one that fails does not take the rest with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ampwise.errors import AmpwiseError, BadInput
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.memory import let_go
from ampwise.user_code import failure

__all__ = ["OUT_OF_MEMORY", "Lineup"]

T = TypeVar("T")

OUT_OF_MEMORY = "out of memory"
# Torch's error, by its name now and in 2.6: to import it takes a second.
GAVE_UP = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
# What an allocator says that has no error of its own.
NO_ROOM = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


class Lineup:
    """Iterates over those that are left."""

    def __init__(self, contenders: Sequence[Contender], device: torch.device) -> None:
        self._left = list(contenders)
        self._device = device
        self.problems: dict[str, str] = {}  # by label, of those that are out
        self.not_seen: list[str] = []  # sentences, about looks that failed

    def add(self, contender: Contender) -> None:
        self._left.append(contender)

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Contender]:
        return iter(tuple(self._left))

    def attempt(self, contender: Contender, work: Callable[[], T]) -> T | None:
        """What the work gives, in this contender's turn; None if it failed, and then the contender is out.

        FP32 may run out of memory; that it runs otherwise, the user has to see to.
        """
        value, problem = self._run(contender, work)
        if problem is not None:
            if contender.is_base and problem != OUT_OF_MEMORY:
                raise BadInput(f"{contender.step.subject.name}: a step in FP32 fails: {problem}.")
            self.drop(contender, problem if problem == OUT_OF_MEMORY else f"failed: {problem}")
        return value

    def look(self, contender: Contender, work: Callable[[], T], what: str) -> T | None:
        """The same for what can be done without: the contender stays, whatever comes of it."""
        value, problem = self._run(contender, work)
        if problem is not None:
            self.not_seen.append(f"{what} of {contender.label}: {problem}.")
        return value

    def drop(self, contender: Contender, problem: str) -> None:
        """It is out, for this reason."""
        self.problems[contender.label] = problem
        self._left = [one for one in self._left if one is not contender]

    def _run(self, contender: Contender, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """What the work gives, or why it gives nothing."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the user's code, once for every precision
                with contender.turn():
                    return work(), None
        except AmpwiseError:
            raise
        except Exception as error:
            problem = _problem(error)
        # Out of the handler, whose error holds the tensors of the frames that it went through.
        contender.step.optimizer.zero_grad(set_to_none=True)
        let_go(self._device)
        return None, problem


def _problem(error: Exception) -> str:
    if type(error).__name__ in GAVE_UP:
        return "torch.compile has compiled it anew too often (its recompile limit) and goes on without compiling"
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in NO_ROOM)
    return OUT_OF_MEMORY if full else failure(error)
