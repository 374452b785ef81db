"""The one thread that is followed: the first to train, and after its end the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Following"]


class Following:
    """Whether a call is to be followed.

    Looking at gradients while another thread makes them would bring down the process. And what torch.compile traces
    must have nothing of ours in it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.others = False  # have trained as well
        self._paused = False

    def __call__(self) -> bool:
        if torch.compiler.is_compiling() or self._paused:
            return False
        current = threading.current_thread()
        if self._thread is not current:
            if self._thread is not None and self._thread.is_alive():
                self.others = True
                return False
            self._thread = current
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called now is ours."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
