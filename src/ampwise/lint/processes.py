"""Work shared among processes, which may die without taking the run with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["in_processes"]

Work = TypeVar("Work")
Result = TypeVar("Result")


def in_processes(
    do: Callable[[Work], Result], works: Sequence[Work], jobs: int
) -> Iterator[tuple[Work, Result | None]]:
    """Each piece of work with its result, as they come; None for one whose process died twice."""
    lost: list[Work] = []
    for work, result in _pooled(do, works, jobs):
        if result is None:
            lost.append(work)
        else:
            yield work, result[0]
    # One process that dies spoils the whole pool: what was lost with it gets a process of its own.
    for work in lost:
        for _, result in _pooled(do, [work], 1):
            yield work, None if result is None else result[0]


def _pooled(
    do: Callable[[Work], Result], works: Sequence[Work], jobs: int
) -> Iterator[tuple[Work, tuple[Result] | None]]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Forked processes have the rules loaded already; elsewhere than on Linux forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle)
    try:
        futures = {pool.submit(do, work): work for work in works}
        for future in as_completed(futures):
            try:
                result = (future.result(),)
            except BrokenProcessPool:
                yield futures[future], None
            else:
                yield futures[future], result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _settle() -> None:
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to it
    gc.disable()  # as the parent does, for the same reason; a process that was not forked does not know of it
