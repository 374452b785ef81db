"""The contenders still in the comparison, and why the others dropped out: one that fails does not stop the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ampwise.errors import AmpwiseError, BadInput
from ampwise.trace.user_code import describe_error
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.peak_memory import free_memory

__all__ = ["OUT_OF_MEMORY", "Lineup"]

T = TypeVar("T")

OUT_OF_MEMORY = "out of memory"
# Torch's error, by its name now and in 2.6: importing it takes a second.
GAVE_UP = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
# Messages of allocators that raise no OutOfMemoryError.
NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


class Lineup:
    """Iterates over the contenders that are left."""

    def __init__(self, contenders: Sequence[Contender], device: torch.device) -> None:
        self._left = list(contenders)
        self._device = device
        self.problems: dict[str, str] = {}  # by label, of contenders that dropped out
        self.not_seen: list[str] = []  # sentences on optional measurements that failed

    def add(self, contender: Contender) -> None:
        self._left.append(contender)

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Contender]:
        return iter(tuple(self._left))

    def attempt(self, contender: Contender, work: Callable[[], T]) -> T | None:
        """Return the result of the work, done in this contender's turn; on failure, drop the contender and return None.

        Raise BadInput if FP32 fails for another reason than memory.
        """
        value, problem = self._run(contender, work)
        if problem is not None:
            if contender.is_base and problem != OUT_OF_MEMORY:
                raise BadInput(f"{contender.step.case.name}: a step in FP32 fails: {problem}.")
            self.drop(contender, problem if problem == OUT_OF_MEMORY else f"failed: {problem}")
        return value

    def look(self, contender: Contender, work: Callable[[], T], what: str) -> T | None:
        """Return the result of an optional measurement; on failure, note it and return None. The contender stays."""
        value, problem = self._run(contender, work)
        if problem is not None:
            self.not_seen.append(f"{what} of {contender.label}: {problem}.")
        return value

    def drop(self, contender: Contender, problem: str) -> None:
        """Remove a contender, for this reason."""
        self.problems[contender.label] = problem
        self._left = [one for one in self._left if one is not contender]

    def _run(self, contender: Contender, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the result of the work, or why it failed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user's code would repeat its warnings for every precision
                with contender.turn():
                    return work(), None
        except AmpwiseError:
            raise
        except Exception as error:
            problem = _problem(error)
        # Outside the handler, as the error holds tensors of the frames it went through.
        contender.step.optimizer.zero_grad(set_to_none=True)
        free_memory(self._device)
        return None, problem


def _problem(error: Exception) -> str:
    if type(error).__name__ in GAVE_UP:
        return "torch.compile reached its recompile limit and would go on without compiling"
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in NO_MEMORY)
    return OUT_OF_MEMORY if full else describe_error(error)
