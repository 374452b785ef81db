"""Forks of a watched process: the child is not watched, and ends as it would without ampwise."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

__all__ = ["end_without_destructors", "notify_of_forks"]


class ForkListener(Protocol):
    """An object that is notified of forks."""

    def about_to_fork(self) -> None:
        """Called in the parent, in the thread that forks."""

    def forked(self) -> None:
        """Called in the child. It must not raise."""


_NOTIFIED: weakref.WeakSet[Any] = weakref.WeakSet()


def notify_of_forks(thing: ForkListener) -> None:
    """Call the object's two methods at each fork, as long as it lives."""
    _NOTIFIED.add(thing)


def end_without_destructors() -> None:
    """Make this process skip the destructors of C++ libraries when it exits.

    The profiler's library keeps a thread. In a forked child that thread does not exist, and the library's destructor
    would wait for it forever. C's buffers are still flushed, and the exit status stays the same.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc has it; it passes the exit status to the handler
        libc.on_exit(libc._exit, None)  # handlers run in reverse order
        libc.__cxa_atexit(libc.fflush, None, None)


def _notify_parent() -> None:
    for each in list(_NOTIFIED):
        each.about_to_fork()


def _notify_child() -> None:
    for each in list(_NOTIFIED):
        each.forked()
    _NOTIFIED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_notify_parent, after_in_child=_notify_child)
