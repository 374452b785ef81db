"""Ways a guarded training stops early: a signal, a watchdog timeout, or a failed recovery."""

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

STOPPED_EXIT_CODE = 70  # EX_SOFTWARE, as in sysexits.h


class Stopped(SystemExit):
    """Raised when the guard stops the training; ``why`` is the reason, ``code`` the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Signals:
    """Handles signals that ask the run to stop: the first is recorded, and acted on between two steps.

    One request often arrives twice: the scheduler signals all processes of a job, and torchrun's agent forwards its
    own. Signals within ``grace`` seconds of the first count as the same request, also while the program cleans up
    after the guard. Later ones, and a second SIGINT (Ctrl-C again) at any time, act as they would without a guard.
    """

    def __init__(self, names: Iterable[str], grace: float) -> None:
        self._wanted: list[signal.Signals] = []
        for name in names:
            try:
                self._wanted.append(signal.Signals[name])
            except (KeyError, TypeError):
                raise BadInput(
                    f"Guard(signals=[{name!r}]): expected the name of a signal, such as 'SIGTERM'."
                ) from None
        self._grace = grace
        self._before: dict[signal.Signals, Any] = {}
        self._child_handler: Any = None  # torch's SIGCHLD handler, disabled since a signal was caught
        self.caught = ""  # name of the first signal
        self.when = 0.0
        self.handled = False

    def listen(self) -> None:
        """Install the handlers. Only the main thread can; other threads change nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._wanted:
            self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        """Restore the previous handlers; not after a handled signal, as its duplicates may still arrive."""
        if self.handled:
            return
        for number, before in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler not set from Python
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
        if self._child_handler is not None:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, self._child_handler)
        self._before.clear()

    def resend(self) -> None:
        """Send a signal that arrived too late to be handled to this process again, without the guard's handler."""
        if self.caught and not self.handled:
            self.handled = True
            os.kill(os.getpid(), signal.Signals[self.caught])

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if not self.caught:
            self.caught, self.when = received.name, time.monotonic()
            # A signal to the process group also ends DataLoader workers. Torch's SIGCHLD handler would raise an error
            # about that in the middle of the step that is to be finished; fetching another batch from them still does.
            handler = signal.getsignal(signal.SIGCHLD)
            if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
                self._child_handler = handler
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        elif received is signal.SIGINT or time.monotonic() - self.when > self._grace:
            before = self._before.get(received, signal.SIG_DFL)
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Watchdog:
    """Ends the process when no step has completed for too long: another rank is gone, and this one waits for it.

    The process may be blocked deep in a library, where no exception reaches it: after printing a diagnosis, it exits
    without cleanup. Checkpoints on disk are complete at any moment.
    """

    def __init__(self, patience: float, report: Callable[[float], None]) -> None:
        self._patience, self._report = patience, report
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Record that a step has completed. The watchdog starts with the first one, since compiling may take long."""
        self._last_beat = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ampwise-guard-watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._patience / 4)):
            silent = time.monotonic() - self._last_beat
            if silent > self._patience:
                self._exit(silent)

    def _exit(self, silent: float) -> None:
        with contextlib.suppress(Exception):
            self._report(silent)
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stderr.flush()
        os._exit(STOPPED_EXIT_CODE)
