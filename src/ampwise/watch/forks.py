"""Forks of a process that is watched: a child has nothing of the watch, and ends as it would without it."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

__all__ = ["end_without_destructors", "follow_forks"]


class Forking(Protocol):
    """What has to know of a fork."""

    def about_to_fork(self) -> None:
        """In the parent, and in the thread that forks."""

    def forked(self) -> None:
        """In the child. It must not raise."""


_FOLLOWING: weakref.WeakSet[Any] = weakref.WeakSet()


def follow_forks(thing: Forking) -> None:
    """Call the two methods at each fork, as long as the thing lives."""
    _FOLLOWING.add(thing)


def end_without_destructors() -> None:
    """Have this process skip the destructors of C++ libraries at its end, which else follow on Python's own end.

    The profiler's library keeps a thread. In a forked child that thread does not exist, and the library's destructor
    waits for it for ever. What C has buffered is written all the same, and the exit status stays what it is.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc has it, which gives a handler the status
        libc.on_exit(libc._exit, None)  # what is registered last is called first
        libc.__cxa_atexit(libc.fflush, None, None)


def _before() -> None:
    for each in list(_FOLLOWING):
        each.about_to_fork()


def _in_child() -> None:
    for each in list(_FOLLOWING):
        each.forked()
    _FOLLOWING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)
