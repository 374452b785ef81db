"""The thread that is followed: the first that trains and, after its end, the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FollowedThread"]


class FollowedThread:
    """Call it to see whether a call in this thread is followed.

    Reading gradients while another thread computes them could crash the process. Callers must check
    ``torch.compiler.is_compiling()`` first, so that torch.compile does not trace this.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ident: int | None = None  # of this thread; faster to compare
        self.others = False  # other threads have trained as well
        self._paused = False

    def __call__(self) -> bool:
        if self._paused:
            return False
        if self._ident == threading.get_ident():
            return True
        current = threading.current_thread()
        if self._thread is not current:
            if self._thread is not None and self._thread.is_alive():
                self.others = True
                return False
            self._thread, self._ident = current, current.ident
        return True

    def stop(self) -> None:
        """Follow nothing any more: wrappers left in place only call the original."""
        self._paused = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no calls within this context: they are ampwise's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
