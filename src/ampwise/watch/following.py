"""The one thread that is followed: the first to train, and after its end the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Following"]


class Following:
    """Whether a call is to be followed.

    Looking at gradients while another thread makes them would bring down the process. (What torch.compile traces must
    have nothing of ours in it: whoever asks here has asked for that before.)
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ident: int | None = None  # its, which is faster to ask for
        self.others = False  # have trained as well
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
        """Follow nothing any more: wrappers that are left in place pass on what they get."""
        self._paused = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called now is ours."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
