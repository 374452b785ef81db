"""Telling people of findings while a run goes on.

Nothing is sent anywhere unless it is asked for. What an alert does, it does in a thread of its own: training never
waits for it and never learns of its troubles, which are said once on stderr.
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
from ampwise.guard.alert_kinds import HELD_BACK, Alert, command, stderr, webhook
from ampwise.printers.terminal import say

__all__ = ["Alert", "Alerts", "Flood", "command", "stderr", "webhook"]

MOST_WAITING = 100  # findings for one alert: of one that is slower, the oldest are left out
MOST_UNSORTED = 10_000  # which takes a thread that could not be started
SAME_RULE_S = 60.0  # between two findings of one rule
CLOSING_S = 10.0
LONGEST_ERROR = 300  # characters


class Flood:
    """Of each rule one finding a minute; the next that goes through says how many were held back before it."""

    def __init__(self, same_rule_s: float = SAME_RULE_S) -> None:
        self._same_rule_s = same_rule_s
        self._free_at: dict[str, float] = {}
        self._held: dict[str, tuple[Finding, int]] = {}  # the latest of each rule, and how many

    def take(self, finding: Finding, now: float) -> Finding | None:
        """The finding, if it may be sent now; else it is held back."""
        code = finding.rule.code
        if now < self._free_at.get(code, now):
            self._held[code] = finding, self._held.get(code, (finding, 0))[1] + 1
            return None
        _, held = self._held.pop(code, (finding, 0))
        return self._sent(finding, held, now)

    def due(self, now: float) -> list[Finding]:
        """Of what is held back, the latest of each rule whose minute is over."""
        codes = [code for code in self._held if now >= self._free_at[code]]
        released = [self._held.pop(code) for code in codes]
        return [self._sent(finding, count - 1, now) for finding, count in released]

    def next_due(self) -> float | None:
        """When there will be some."""
        return min((self._free_at[code] for code in self._held), default=None)

    def rest(self) -> list[Finding]:
        """Of what is held back, the latest of each rule; nothing is kept."""
        released = list(self._held.values())
        self._held.clear()
        return [_with_held(finding, count - 1) for finding, count in released]

    def _sent(self, finding: Finding, held: int, now: float) -> Finding:
        self._free_at[finding.rule.code] = now + self._same_rule_s
        return _with_held(finding, held)


def _with_held(finding: Finding, held: int) -> Finding:
    return finding.but(evidence={**finding.evidence, HELD_BACK: held}) if held else finding


class Alerts:
    """The alerts of a run: ``send`` costs microseconds and never raises.

    One thread holds back what comes too often, and each alert has one of its own, so that none holds up another. The
    threads are daemons and start with the first finding. A forked process has the alerts too, and sends nothing.
    """

    def __init__(self, functions: Iterable[Alert], *, same_rule_s: float = SAME_RULE_S) -> None:
        self._ways = [_Way(function) for function in _checked(functions)]
        self._flood = Flood(same_rule_s)
        self._inlet: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()  # whose put a signal handler may interrupt
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._pid, self._closed = os.getpid(), False

    def send(self, finding: Finding) -> None:
        """Hand a finding over."""
        if self._closed or not self._ways or os.getpid() != self._pid:
            return
        if self._inlet.qsize() < MOST_UNSORTED:
            self._inlet.put(finding)
        if self._thread is None:
            self._start()

    def close(self, timeout: float = CLOSING_S) -> None:
        """Send what waits, and wait for it, no longer than ``timeout`` seconds in all."""
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout
        self._inlet.put(None)
        self._thread.join(timeout)  # it waits for nobody
        for way in self._ways:
            way.wait(deadline)

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
                self._pass_on(self._flood.due(time.monotonic()))
                continue
            if finding is None:
                break
            taken = self._flood.take(finding, time.monotonic())
            self._pass_on([] if taken is None else [taken])
        self._pass_on(self._flood.rest())
        for way in self._ways:
            way.end()

    def _until_due(self) -> float | None:
        due = self._flood.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    def _pass_on(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            for way in self._ways:
                way.put(finding)


class _Way:
    """One alert, with the findings that wait for it."""

    def __init__(self, function: Alert) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._waiting: deque[Finding] = deque(maxlen=MOST_WAITING)
        self._some = threading.Condition()
        self._ended = self._complained = False
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def put(self, finding: Finding) -> None:
        with self._some:
            self._waiting.append(finding)
            self._some.notify()
        if self._thread is None:
            self._thread = _started(self._work, f"ampwise-alert-{self._name}")

    def end(self) -> None:
        with self._some:
            self._ended = True
            self._some.notify()

    def wait(self, deadline: float) -> None:
        if self._thread is not None and not self._done.wait(max(0.0, deadline - time.monotonic())):
            self._complain("was still busy at the end, and was not waited for")

    def _work(self) -> None:
        while (finding := self._next()) is not None:
            try:
                self._function(finding)
            except BaseException as error:  # SystemExit too: whatever it does, training goes on
                self._complain(f"failed, and is tried again with the next finding: {_in_words(error)}")
        self._done.set()

    def _next(self) -> Finding | None:
        with self._some:
            self._some.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.popleft() if self._waiting else None

    def _complain(self, what: str) -> None:
        """Once."""
        if self._complained:
            return
        self._complained = True
        try:
            say("ampwise: warning: the alert {} {}", self._name, what)
        except (OSError, ValueError):  # nobody can be told
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
        raise BadInput("alerts: a list of functions is expected that take a finding: alerts=[stderr()].")
    given = list(functions)
    for function in given:
        if not callable(function):
            raise BadInput(f"alerts: {function!r} cannot be called; give webhook(url), command([...]) or a function.")
    return given


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())[:LONGEST_ERROR]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
