"""Alerts: send findings to people while a run is going on.

Nothing is sent unless the user configures it. Each alert runs in its own thread: training never waits for it and never
fails because of it; its first error is printed once on stderr.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.terminal import say
from ampwise.guard.alert_kinds import HELD_BACK, Alert, command, stderr, webhook

__all__ = ["Alert", "Alerts", "RateLimiter", "command", "stderr", "webhook"]

MOST_WAITING = 100  # findings queued for one alert; a slow alert loses the oldest
MOST_UNSORTED = 10_000  # findings queued for all; reached only if the thread could not be started
SAME_RULE_S = 60.0  # between two findings of the same rule
CLOSING_S = 10.0
LONGEST_ERROR = 300  # characters


class RateLimiter:
    """Rate limit: one finding per rule and minute. The next one sent says how many were held back before it."""

    def __init__(self, same_rule_s: float = SAME_RULE_S) -> None:
        self._same_rule_s = same_rule_s
        self._free_at: dict[str, float] = {}
        self._held: dict[str, tuple[Finding, int]] = {}  # the latest finding of each rule, and how many

    def take(self, finding: Finding, now: float) -> Finding | None:
        """Return the finding if it may be sent now; else hold it back and return None."""
        code = finding.rule.code
        if now < self._free_at.get(code, now):
            self._held[code] = finding, self._held.get(code, (finding, 0))[1] + 1
            return None
        _, held = self._held.pop(code, (finding, 0))
        return self._sent(finding, held, now)

    def due(self, now: float) -> list[Finding]:
        """Return held-back findings whose minute is over: the latest of each rule."""
        codes = [code for code in self._held if now >= self._free_at[code]]
        released = [self._held.pop(code) for code in codes]
        return [self._sent(finding, count - 1, now) for finding, count in released]

    def next_due(self) -> float | None:
        """Return when the next held-back finding is due; None if there is none."""
        return min((self._free_at[code] for code in self._held), default=None)

    def drain(self) -> list[Finding]:
        """Return the latest held-back finding of each rule, and clear them."""
        released = list(self._held.values())
        self._held.clear()
        return [_with_held(finding, count - 1) for finding, count in released]

    def _sent(self, finding: Finding, held: int, now: float) -> Finding:
        self._free_at[finding.rule.code] = now + self._same_rule_s
        return _with_held(finding, held)


def _with_held(finding: Finding, held: int) -> Finding:
    return finding.but(evidence={**finding.evidence, HELD_BACK: held}) if held else finding


class Alerts:
    """All alerts of a run. ``send`` costs microseconds and never raises.

    One thread applies the rate limit, and each alert has its own thread, so that a slow one does not delay the others.
    The threads are daemons and start with the first finding. Forked processes send nothing.
    """

    def __init__(self, functions: Iterable[Alert], *, same_rule_s: float = SAME_RULE_S) -> None:
        self._alert_threads = [_AlertThread(function) for function in _checked(functions)]
        self._limiter = RateLimiter(same_rule_s)
        self._inlet: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()  # put() is safe in signal handlers
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._pid, self._closed = os.getpid(), False

    def send(self, finding: Finding) -> None:
        """Queue a finding."""
        if self._closed or not self._alert_threads or os.getpid() != self._pid:
            return
        if self._inlet.qsize() < MOST_UNSORTED:
            self._inlet.put(finding)
        if self._thread is None:
            self._start()

    def close(self, timeout: float = CLOSING_S) -> None:
        """Send the queued findings; wait at most ``timeout`` seconds in total."""
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout
        self._inlet.put(None)
        self._thread.join(timeout)
        for thread in self._alert_threads:
            thread.wait(deadline)

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._thread = _started(self._sort, "ampwise-alerts")
        if self._thread is not None:
            atexit.register(self.close)

    def _sort(self) -> None:
        while True:
            try:
                finding = self._inlet.get(timeout=self._until_due())
            except queue.Empty:
                self._pass_on(self._limiter.due(time.monotonic()))
                continue
            if finding is None:
                break
            taken = self._limiter.take(finding, time.monotonic())
            self._pass_on([] if taken is None else [taken])
        self._pass_on(self._limiter.drain())
        for thread in self._alert_threads:
            thread.end()

    def _until_due(self) -> float | None:
        due = self._limiter.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    def _pass_on(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            for thread in self._alert_threads:
                thread.put(finding)


class _AlertThread:
    """One alert with its queue and thread."""

    def __init__(self, function: Alert) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._waiting: deque[Finding] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._ended = self._complained = False
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def put(self, finding: Finding) -> None:
        with self._changed:
            self._waiting.append(finding)
            self._changed.notify()
        if self._thread is None:
            self._thread = _started(self._work, f"ampwise-alert-{self._name}")

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        if self._thread is not None and not self._done.wait(max(0.0, deadline - time.monotonic())):
            self._complain("was still busy at the end; it was not waited for")

    def _work(self) -> None:
        while (finding := self._next()) is not None:
            try:
                self._function(finding)
            except BaseException as error:  # SystemExit too: training continues whatever an alert does
                self._complain(f"failed; the next finding will be tried again: {_error_text(error)}")
        self._done.set()

    def _next(self) -> Finding | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.popleft() if self._waiting else None

    def _complain(self, what: str) -> None:
        """Print a warning, once."""
        if self._complained:
            return
        self._complained = True
        try:
            say("ampwise: warning: the alert {} {}", self._name, what)
        except (OSError, ValueError):  # stderr is closed
            return


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: the next finding tries again
        return None
    return thread


def _checked(functions: Any) -> list[Alert]:
    if callable(functions) or isinstance(functions, str) or not isinstance(functions, Iterable):
        raise BadInput("alerts: expected a list of functions that take a finding: alerts=[stderr()].")
    given = list(functions)
    for function in given:
        if not callable(function):
            raise BadInput(f"alerts: {function!r} is not callable; give webhook(url), command([...]) or a function.")
    return given


def _error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:LONGEST_ERROR]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
