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
from ampwise.finding.terminal import log_line
from ampwise.guard.events import GuardEvent, RankLost
from ampwise.report.printers import log_findings
from ampwise.rules import run_checks
from ampwise.runs.events import EVENT_LISTENERS
from ampwise.trace.bad_steps import FINDING_LISTENERS

__all__ = ["EventReporter", "OnEvent"]

OnEvent = Callable[[GuardEvent], object]
Event = TypeVar("Event", bound=GuardEvent)

MOST_WAITING = 1000  # events queued for a slow ``on_event``; further ones are dropped
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
        try:
            found = run_checks(event)
        except Exception as error:  # a rule of a plugin: the training continues
            found = []
            log_line("ampwise: warning: a rule failed on the event {}: {}", event.name, repr(error)[:LONGEST_ERROR])
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
        log_line("ampwise: {}{}{}", at, event.message, advice)

    def log(self, text: str) -> None:
        """Print a line that is not an event."""
        if self._prints:
            log_line("ampwise: {}", text)

    def close(self) -> None:
        """Wait a while for ``on_event`` to take the last events."""
        if self._on_event is not None:
            self._on_event.close()


class _InBackground:
    """Calls the user's function with each event, in a thread that starts with the first: training never waits for it,
    and never fails because of it. Its first error is printed."""

    def __init__(self, function: OnEvent) -> None:
        self._function = function
        self._waiting: queue.SimpleQueue[GuardEvent | None] = queue.SimpleQueue()  # put() is safe in signal handlers
        self._thread: threading.Thread | None = None
        self._complained = False

    def put(self, event: GuardEvent) -> None:
        if self._waiting.qsize() < MOST_WAITING:
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
        atexit.unregister(self.close)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(CLOSING_S)
            if thread.is_alive():
                self._complain("was still busy at the end; it was not waited for")

    def _call(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._function(event)
            except BaseException as error:  # SystemExit too: training continues whatever it does
                self._complain("failed; it will be called with the next event all the same", error)

    def _complain(self, what: str, error: BaseException | None = None) -> None:
        """Print a warning, once."""
        if self._complained:
            return
        self._complained = True
        with suppress(Exception):  # stderr is closed, or the error's own __str__ fails
            why = "" if error is None else " ".join(f": {type(error).__name__}: {error}".split())[:LONGEST_ERROR]
            log_line("ampwise: warning: on_event {}{}", what, why)
