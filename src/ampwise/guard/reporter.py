"""Reporting of a guard's events: on stderr, to the record of a watched run, and to the user's ``on_event``."""

from __future__ import annotations

import atexit
import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.log import log
from ampwise.finding.registry import run_checks
from ampwise.guard.events import GuardEvent, RankLost
from ampwise.report.printers import log_findings
from ampwise.runs.events import EVENT_LISTENERS
from ampwise.trace.bad_steps import FINDING_LISTENERS

OnEvent = Callable[[GuardEvent], object]
Event = TypeVar("Event", bound=GuardEvent)

CLOSING_S = 10.0  # to wait at the end for ``on_event``
LONGEST_ERROR = 300  # characters


class EventReporter:
    """Keeps all events, and prints them; of a repeated one, the 1st, 2nd, 4th, 8th and so on.

    What a user must act on is a finding, too: an event that a rule takes. It is printed in full, and each time if it is
    an error.
    """

    def __init__(self, on_event: OnEvent | None, *, prints: bool) -> None:
        if on_event is not None and not callable(on_event):
            raise BadInput(f"Guard(on_event={on_event!r}): expected a function that takes an event.")
        self.events: list[GuardEvent] = []
        self.findings: list[Finding] = []
        self._prints = prints
        self._on_event = _InBackground(on_event) if on_event is not None and prints else None
        self._times: Counter[str] = Counter()

    def report(self, event: Event) -> Event:
        """Keep an event, on every rank; rank 0 prints it and passes it on."""
        found = run_checks(event, keep_going=True)  # the training continues if a rule of a plugin fails
        self.events.append(event)
        self.findings += found
        if self._prints:
            for listener in EVENT_LISTENERS:
                listener(event.logged())
            for finding_listener in FINDING_LISTENERS:
                for finding in found:
                    finding_listener(finding, event.step or 0)
            if self._on_event is not None:
                self._on_event.put(event)
        # Any rank may be the last one that is left.
        if (self._prints and not EVENT_LISTENERS) or (not self._prints and isinstance(event, RankLost)):
            self._print(event, found)
        return event

    def _print(self, event: GuardEvent, found: list[Finding]) -> None:
        self._times[event.name] += 1
        times = self._times[event.name]
        if times & (times - 1) and event.level != "error":
            return
        if found:
            log_findings(found)
            return
        at = "" if event.step is None else f"step {event.step:,}: "
        advice = f". {event.advice}" if event.advice and times == 1 else ""
        log(event.level, "{}{}{}", at, event.message, advice)

    def log(self, text: str) -> None:
        """Print a line that is not an event."""
        if self._prints:
            log("info", "{}", text)

    def close(self) -> None:
        """Wait a while for ``on_event`` to take the last events."""
        if self._on_event is not None:
            self._on_event.close()


class _InBackground:
    """Calls the user's function with each event, in order, in one thread that starts with the first.

    Training never waits for it, and never fails because of it. Its first error is printed, and events that it did not
    get.
    """

    def __init__(self, function: OnEvent) -> None:
        self._function = function
        self._waiting: queue.SimpleQueue[GuardEvent | None] = queue.SimpleQueue()  # put() is safe in signal handlers
        self._thread: threading.Thread | None = None
        self._failed = self._closed = False

    def put(self, event: GuardEvent) -> None:
        if self._closed:
            _warn(f"was not called with {event.name!r}, which came after the guard was closed")
            return
        self._waiting.put(event)
        if self._thread is None:
            thread = threading.Thread(target=self._call, name="ampwise-on-event", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the next event tries again
                return
            self._thread = thread
            atexit.register(self.close)

    def close(self) -> None:
        """Wait for the events that were put, for a while."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(CLOSING_S)
            if self._thread.is_alive():
                left = max(self._waiting.qsize() - 1, 0)
                further = f"; {left:,} further events did not reach it" if left else ""
                _warn(f"was still busy at the end; it was not waited for{further}")
        elif left := self._waiting.qsize():
            _warn(f"was not called: no thread could be started; {left:,} events did not reach it")

    def _call(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._function(event)
            except BaseException as error:  # SystemExit too: training continues whatever it does
                if not self._failed:
                    self._failed = True
                    _warn("failed; it will be called with the next event all the same", error)


def _warn(what: str, error: BaseException | None = None) -> None:
    with suppress(Exception):  # stderr is closed, or the error's own __str__ fails
        why = "" if error is None else " ".join(f": {type(error).__name__}: {error}".split())[:LONGEST_ERROR]
        log("warning", "on_event {}{}", what, why)
