"""How a guarded training ends before its time: by a signal, by silence, or because nothing helps."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ampwise.errors import BadInput

__all__ = ["STOPPED", "Signals", "Stopped", "Watchdog"]

STOPPED = 70  # EX_SOFTWARE, as in sysexits.h


class Stopped(SystemExit):
    """A training that was ended by its guard, which has said why. ``code`` is the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Signals:
    """Signals that ask for an end: the first is noted, and heeded between two steps.

    One request often comes twice: the scheduler signals all processes of a job, and torchrun's agent forwards what it
    got. Within ``grace`` seconds of the first, others are part of it, also while the program cleans up after the guard.
    Later ones, and a second SIGINT at any time (a person who presses Ctrl-C again), do what they do without a guard.
    """

    def __init__(self, names: Iterable[str], grace: float) -> None:
        self._wanted, self._grace = [_checked(name) for name in names], grace
        self._before: dict[signal.Signals, Any] = {}
        self._of_children: Any = None  # torch's handler of SIGCHLD, set aside since a signal was caught
        self.caught = ""  # the name of the first
        self.when = 0.0
        self.heeded = False

    def listen(self) -> None:
        """From now on. Only the main thread may; elsewhere nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._wanted:
            self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        """Handlers are as they were; but after a signal was heeded, its duplicates may still be on their way."""
        if self.heeded:
            return
        for number, before in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that was not Python's
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
        if self._of_children is not None:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, self._of_children)
        self._before.clear()

    def pass_on(self) -> None:
        """A signal that came too late to be heeded is not lost: it does what it would have done without a guard."""
        if self.caught and not self.heeded:
            self.heeded = True
            os.kill(os.getpid(), signal.Signals[self.caught])

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if not self.caught:
            self.caught, self.when = received.name, time.monotonic()
            self._expect_loader_workers_to_end()
        elif received is signal.SIGINT or time.monotonic() - self.when > self._grace:
            before = self._before.get(received, signal.SIG_DFL)
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _expect_loader_workers_to_end(self) -> None:
        """A signal to the process group ends the workers of a DataLoader, too. Torch would raise that in the middle of
        the step that is to be finished; whoever asks them for another batch is still told."""
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
            self._of_children = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _checked(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except (KeyError, TypeError):
        raise BadInput(f"Guard(signals=[{name!r}]): a signal is expected by name, such as 'SIGTERM'.") from None


class Watchdog:
    """Ends the process when no step has been closed for too long: some rank is gone, and this one waits for it.

    What it waits in may be deep in a library, where no exception reaches it: after the diagnosis, the process ends as
    it is. What is on disk is whole at any moment.
    """

    def __init__(self, patience: float, last_words: Callable[[float], None]) -> None:
        self._patience, self._last_words = patience, last_words
        self._beaten = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """A step is over. Before the first, nothing is expected: compiling may take its time."""
        self._beaten = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ampwise-guard-watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._patience / 4)):
            silent = time.monotonic() - self._beaten
            if silent > self._patience:
                self._bark(silent)

    def _bark(self, silent: float) -> None:
        with contextlib.suppress(Exception):
            self._last_words(silent)
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stderr.flush()
        os._exit(STOPPED)
