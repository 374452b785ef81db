"""The sinks of a run, each in its own thread: the training never waits for one and never fails because of one."""

from __future__ import annotations

import atexit
import contextvars
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ampwise.errors import BadInput
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import LayerSample, StepRow
from ampwise.runs.sinks.metrics import MetricRows, MetricsRow, SkipCounter, TimedEvent
from ampwise.runs.writer import RunEvent

if TYPE_CHECKING:
    from ampwise.runs.sinks import SinkRequest

SINK_FAILED = "sink-failed"
MOST_WAITING = 10_000  # queued events; beyond that the oldest are dropped, which is reported at the end
MOST_SAMPLES = 16  # queued layer samples; those of a large model take megabytes
BATCH = 500  # most events sent at once
LONGEST_ERROR = 500  # characters
LONGEST_BEFORE_FORKS = 2.0  # seconds to wait before forks, in total
WAIT_VARIABLE = "AMPWISE_SINK_WAIT"
LONGEST_WAIT_S = 86_400.0


class WaitLimits(NamedTuple):
    """How long a run waits for its sinks at the end, in seconds."""

    still: float = 5.0  # without progress of a sink
    in_all: float = 60.0


def wait_limits() -> WaitLimits:
    """Return the limits from the environment variable, or the defaults."""
    text = os.environ.get(WAIT_VARIABLE)
    if not text:
        return WaitLimits()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= LONGEST_WAIT_S:
        raise BadInput(f"{WAIT_VARIABLE}={text}: expected a number of seconds from 0 to {LONGEST_WAIT_S:.0f}.")
    return WaitLimits(seconds, seconds)


class SinkPhase(StrEnum):
    """What the sink was doing when it failed."""

    OPENING = "opening"
    SENDING = "sending"
    CLOSING = "closing"
    WAITING = "waiting"  # for it to finish at the end of the run
    KEEPING_UP = "keeping up"  # it works, but is slower than the training


ADVICE = {
    SinkPhase.OPENING: "Fix the reported problem, or choose another target.",
    SinkPhase.SENDING: "Fix the reported problem, or choose another target.",
    SinkPhase.CLOSING: "Check whether the sink has the last rows, and fix the reported problem.",
    SinkPhase.WAITING: f"Check whether its server is reachable, or set {WAIT_VARIABLE} to more seconds.",
    SinkPhase.KEEPING_UP: "Use a local sink, such as jsonl or tensorboard on this machine.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailure:
    """A sink that failed or fell behind: the run goes on without it, and the sink lacks some of its numbers."""

    sink: str
    when: SinkPhase
    error: str | None = None  # the error message
    sent: int = 0  # rows
    lost: int = 0  # rows, as far as known
    in_hand: int = 0  # lost rows that were in flight; some of them may have arrived

    def logged(self) -> LoggedEvent:
        """Return the failure as an event of the run."""
        unsure = self.in_hand > 1  # a single row in flight is known to be lost
        rows = ("at least " if unsure else "") + ("1 row" if self.sent == 1 else f"{self.sent:,} rows")
        lost = ("up to " if unsure else "") + f"{self.lost:,}"
        dropped = f"{lost} row was dropped" if self.lost == 1 else f"{lost} rows were dropped"
        happened = {
            SinkPhase.OPENING: f"could not be opened: {self.error}",
            SinkPhase.SENDING: f"failed after {rows} and was dropped: {self.error}",
            SinkPhase.CLOSING: f"received {rows}, and failed on closing: {self.error}",
            SinkPhase.WAITING: f"was still busy when the run ended and was abandoned: {rows} sent, {lost} not",
            SinkPhase.KEEPING_UP: f"is slower than the training: {dropped}, {rows} sent",
        }
        return LoggedEvent(
            name=SINK_FAILED,
            level="warning",
            message=f"the sink `{self.sink}` {happened[self.when]}",
            advice=f"{ADVICE[self.when]} The record is complete: `ampwise report RUN`.",
            fields={"sink": self.sink, "when": str(self.when), "sent": self.sent, "lost": self.lost},
        )


class SinkThreads:
    """Sends each event of a run to all sinks, without waiting and without raising.

    failed: called with an event for each sink that fails, once, from any thread. at_exit: see ``SinkThread``.
    """

    def __init__(
        self,
        openings: Sequence[SinkRequest],
        failed: Callable[[LoggedEvent], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._threads = [SinkThread(opening, failed, at_exit) for opening in openings]
        self._skips = SkipCounter()
        self._limits = wait_limits()
        self._ended = self._closed = False

    def send(self, event: RunEvent) -> None:
        """Send an event of the run; takes microseconds."""
        if not self._ended:
            fact = TimedEvent(time.time(), event, self._skips.rate(event) if isinstance(event, StepRow) else None)
            for thread in self._threads:
                thread.put(fact)

    def end(self) -> None:
        """Signal the end: the sinks send what is queued and close. Returns at once."""
        if not self._ended:
            self._ended = True
            for thread in self._threads:
                thread.end()

    def close(self, seconds: float | None = None) -> None:
        """Send what is queued and close the sinks; give up after the user's time limit, or ``seconds``."""
        self.end()
        if self._closed:
            return
        self._closed = True
        began = time.monotonic()
        limits = self._limits if seconds is None else WaitLimits(seconds, seconds)
        try:
            for thread in self._threads:
                thread.wait(began, limits)
        except KeyboardInterrupt:  # stop waiting
            for thread in self._threads:
                thread.wait(began, WaitLimits(0.0, 0.0))


class SinkThread:
    """Queue and thread of one sink. The thread opens the sink, turns events into rows, sends them, and closes it.

    Computing the underflow of a large model takes milliseconds, which the thread spends and not the training.

    Each sink has its own thread, so that one that hangs does not delay others. The threads are daemons and do not keep
    the interpreter alive. Forked processes send nothing. failed: called once, with the first error. at_exit: called
    when the interpreter exits; registered again after the first rows were sent, so that it runs before the exit
    handlers of the sink's package.
    """

    def __init__(
        self,
        opening: SinkRequest,
        failed: Callable[[LoggedEvent], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._opening, self._failed, self._at_exit = opening, failed, at_exit
        self._facts: queue.SimpleQueue[TimedEvent | None] = queue.SimpleQueue()  # put() is safe in signal handlers
        self._metrics = MetricRows()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # not join(), which may return early when interrupted
        self._lock = threading.Lock()
        self._pid, self._off = os.getpid(), False
        self._samples: deque[None] = deque()  # one per queued sample; a deque, which is safe in signal handlers
        self._settled = threading.Event()  # it has accepted rows, and imports nothing more
        self._before_forks = LONGEST_BEFORE_FORKS
        self._in_hand = 0  # rows being sent
        self._moved = 0.0  # time of the last progress
        self.sent = self.lost = 0

    # --- called by the training ------------------------------------------------------------------------------------

    def put(self, fact: TimedEvent) -> None:
        """Queue an event; takes microseconds and never raises."""
        if self._off or os.getpid() != self._pid:
            return
        try:
            if isinstance(fact.event, LayerSample):
                if len(self._samples) >= MOST_SAMPLES:
                    self.lost += _makes_a_row(fact)
                    return
                self._samples.append(None)
            if self._facts.qsize() >= MOST_WAITING:
                self._drop_oldest()
            self._facts.put(fact)
            if self._thread is None:
                # In the script's context, because some packages store their current run there.
                work, name = contextvars.copy_context().run, f"ampwise-sink-{self._opening.label}"
                self._thread = threading.Thread(target=work, args=(self._work,), name=name, daemon=True)
                self._call_at_exit()
                _STARTED.add(self)
                self._thread.start()
        except Exception as error:  # no more threads, no more memory
            self._give_up(SinkPhase.OPENING, error)

    def end(self) -> None:
        """Signal that no more events follow; returns at once."""
        if self._thread is not None and os.getpid() == self._pid:
            self._facts.put(None)

    def wait(self, began: float, limits: WaitLimits) -> None:
        """Wait until everything is sent and the sink is closed, or the time is up. began: from ``time.monotonic``."""
        if self._thread is None or self._cannot_wait():
            return
        while not self._done.is_set():
            left = min(began + limits.in_all, max(began, self._moved) + limits.still) - time.monotonic()
            if left <= 0.0:
                break
            self._done.wait(left)
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if not self._done.is_set():
            self._give_up(SinkPhase.WAITING)
            self._facts.put(None)  # it may still close the sink

    def let_settle(self) -> None:
        """Wait briefly until the sink imports nothing more: a process forked during an import could deadlock."""
        if self._before_forks <= 0.0 or self._cannot_wait():
            return
        began = time.monotonic()
        self._settled.wait(self._before_forks)
        self._before_forks -= time.monotonic() - began

    def _cannot_wait(self) -> bool:
        return os.getpid() != self._pid or threading.current_thread() is self._thread

    def _call_at_exit(self) -> None:
        """Register the handler again: the last one registered runs first."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        when = SinkPhase.OPENING
        try:
            rows = self._next_rows()
            if not rows:
                return
            with self._opening.open() as send:
                when = SinkPhase.SENDING
                while rows:
                    send(rows)
                    if not self.sent:
                        self._settled.set()
                        self._call_at_exit()
                    self.sent += len(rows)
                    self._in_hand, self._moved = 0, time.monotonic()
                    rows = self._next_rows()
                when = SinkPhase.CLOSING
            if self.lost:
                self._give_up(SinkPhase.KEEPING_UP)
        except BaseException as error:  # SystemExit too: it ends only this sink
            self._give_up(when, error)
        finally:
            self._settled.set()
            self._done.set()

    def _next_rows(self) -> list[MetricsRow]:
        """Wait for rows and return them in order; empty at the end."""
        rows: list[MetricsRow] = []
        while not rows:
            facts: list[TimedEvent] = []
            fact = self._facts.get()
            with suppress(queue.Empty):
                while fact is not None:
                    facts.append(self._taken(fact))
                    if len(facts) >= (self._opening.at_a_time or BATCH):
                        break
                    fact = self._facts.get_nowait()
                    if fact is None:
                        self._facts.put(None)  # for the next time
            if not facts:
                return []
            self._in_hand = sum(map(_makes_a_row, facts))
            rows = [row for row in map(self._metrics.row, facts) if row is not None]
            self._in_hand = len(rows)
        return rows

    def _taken(self, fact: TimedEvent) -> TimedEvent:
        if isinstance(fact.event, LayerSample):
            self._samples.pop()
        return fact

    def _drop_oldest(self) -> bool:
        """Drop the oldest event; return False if the queue is empty."""
        try:
            fact = self._facts.get_nowait()
        except queue.Empty:
            return False
        if fact is not None:
            self.lost += _makes_a_row(self._taken(fact))
        return True

    def _give_up(self, when: SinkPhase, error: BaseException | None = None) -> None:
        """Stop sending, and report the first error."""
        with self._lock:
            if self._off:
                return
            self._off = True
        while self._drop_oldest():
            pass
        failure = SinkFailure(
            sink=self._opening.label,
            when=when,
            error=None if error is None else _error_text(error),
            sent=self.sent,
            lost=self.lost + self._in_hand,
            in_hand=self._in_hand,
        )
        with suppress(Exception):  # the training continues even if the error cannot be reported
            self._failed(failure.logged())


_STARTED: weakref.WeakSet[SinkThread] = weakref.WeakSet()


def _before_fork() -> None:
    for thread in list(_STARTED):
        thread.let_settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _makes_a_row(fact: TimedEvent) -> bool:
    """Whether an event gives a row, as far as that is known without computing it."""
    event = fact.event
    return isinstance(event, StepRow) or (isinstance(event, LayerSample) and event.scale is not None)


def _error_text(error: BaseException) -> str:
    try:
        lines = str(error).split("\n")
    except Exception:  # __str__ of a third-party class may raise
        lines = []
    first = next((line.strip() for line in lines if line.strip()), "(no message)")
    return f"{type(error).__name__}: {first[:LONGEST_ERROR]}"
