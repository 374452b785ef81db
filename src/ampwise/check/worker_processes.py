"""Split work among processes; the run survives if one dies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["run_in_processes"]

Work = TypeVar("Work")
Result = TypeVar("Result")


def run_in_processes(
    do: Callable[[Work], Result], works: Sequence[Work], jobs: int
) -> Iterator[tuple[Work, Result | None]]:
    """Yield each piece of work with its result, as they finish; None if its process died twice."""
    lost: list[Work] = []
    for work, result in _pooled(do, works, jobs):
        if result is None:
            lost.append(work)
        else:
            yield work, result[0]
    # One process that dies breaks the whole pool: each lost piece of work gets a process of its own.
    for work in lost:
        for _, result in _pooled(do, [work], 1):
            yield work, None if result is None else result[0]


def _pooled(
    do: Callable[[Work], Result], works: Sequence[Work], jobs: int
) -> Iterator[tuple[Work, tuple[Result] | None]]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Forked processes have the rules already loaded; forking is safe on Linux only.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_set_up_worker)
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


def _set_up_worker() -> None:
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    gc.disable()  # as in the parent, see cli/check.py; needed here for processes that are not forked
