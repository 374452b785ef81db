"""Send rows to a sink in a background thread: the training never waits for it and never fails because of it."""

from __future__ import annotations

import atexit
import contextvars
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ampwise.runs.rows import LayerSample, StepRow
from ampwise.runs.sinks.failure import SinkFailure, SinkPhase
from ampwise.runs.sinks.metrics import MetricRows, TimedEvent

if TYPE_CHECKING:
    from ampwise.runs.sinks import SinkRequest
    from ampwise.runs.sinks.metrics import MetricsRow
    from ampwise.runs.sinks.wait_limits import WaitLimits

__all__ = ["SinkThread"]

MOST_WAITING = 10_000  # queued facts; beyond that the oldest are dropped, which is reported at the end
MOST_SAMPLES = 16  # queued layer samples; those of a large model take megabytes
BATCH = 500  # most facts sent at once
LONGEST_ERROR = 500  # characters
LONGEST_BEFORE_FORKS = 2.0  # seconds to wait before forks, in total


class SinkThread:
    """Queue and thread of one sink. The thread opens the sink, turns facts into rows, sends them, and closes it.

    Computing the underflow of a large model takes milliseconds, which the thread spends and not the training.

    Each sink has its own thread, so that one that hangs does not delay others. The threads are daemons and do not keep
    the interpreter alive. Forked processes send nothing. failed: called once, with the first error. at_exit: called
    when the interpreter exits; registered again after the first rows were sent, so that it runs before the exit
    handlers of the sink's package.
    """

    def __init__(
        self,
        opening: SinkRequest,
        failed: Callable[[SinkFailure], None],
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

    def put(self, fact: TimedEvent) -> None:
        """Queue a fact; takes microseconds and never raises."""
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
                self._start()
        except Exception as error:  # no more threads, no more memory
            self._give_up(SinkPhase.OPENING, error)

    def end(self) -> None:
        """Signal that no more facts follow; returns at once."""
        if self._thread is not None and os.getpid() == self._pid:
            self._facts.put(None)

    def wait(self, began: float, patience: WaitLimits) -> None:
        """Wait until everything is sent and the sink is closed, or the time is up. began: from ``time.monotonic``."""
        if self._thread is None or os.getpid() != self._pid or self._is_own_thread():
            return
        while not self._done.is_set():
            until = min(began + patience.in_all, max(began, self._moved) + patience.still)
            left = until - time.monotonic()
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
        if os.getpid() != self._pid or self._is_own_thread() or self._before_forks <= 0.0:
            return
        began = time.monotonic()
        self._settled.wait(self._before_forks)
        self._before_forks -= time.monotonic() - began

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        # In the script's context, because some packages store their current run there.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name=f"ampwise-sink-{self._opening.label}", daemon=True
        )
        self._call_at_exit()
        _STARTED.add(self)
        self._thread.start()

    def _call_at_exit(self) -> None:
        """Register the handler again: the last one registered runs first."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def _work(self) -> None:
        when = SinkPhase.OPENING
        try:
            rows = self._next()
            if not rows:
                return
            with self._opening.open() as send:
                when = SinkPhase.SENDING
                while rows:
                    send(rows)
                    self._has_sent(rows)
                    rows = self._next()
                when = SinkPhase.CLOSING
            if self.lost:
                self._give_up(SinkPhase.KEEPING_UP)
        except BaseException as error:  # SystemExit too: it ends only this sink
            self._give_up(when, error)
        finally:
            self._settled.set()
            self._done.set()

    def _has_sent(self, rows: list[MetricsRow]) -> None:
        if not self.sent:
            self._settled.set()
            self._call_at_exit()
        self.sent += len(rows)
        self._in_hand, self._moved = 0, time.monotonic()

    def _next(self) -> list[MetricsRow]:
        """Wait for rows and return them in order; empty at the end."""
        rows: list[MetricsRow] = []
        while not rows and (facts := self._next_facts()):
            self._in_hand = sum(map(_makes_a_row, facts))
            rows = [row for row in map(self._metrics.row, facts) if row is not None]
            self._in_hand = len(rows)
        return rows

    def _next_facts(self) -> list[TimedEvent]:
        fact = self._facts.get()
        if fact is None:
            return []
        facts = [self._taken(fact)]
        while len(facts) < (self._opening.at_a_time or BATCH):
            try:
                fact = self._facts.get_nowait()
            except queue.Empty:
                break
            if fact is None:
                self._facts.put(None)  # for the next time
                break
            facts.append(self._taken(fact))
        return facts

    def _taken(self, fact: TimedEvent) -> TimedEvent:
        if isinstance(fact.event, LayerSample):
            self._samples.pop()
        return fact

    def _drop_oldest(self) -> bool:
        """Drop the oldest fact; return False if the queue is empty."""
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
        trouble = SinkFailure(
            sink=self._opening.label,
            when=when,
            error=_error_text(error),
            sent=self.sent,
            lost=self.lost + self._in_hand,
            in_hand=self._in_hand,
        )
        try:
            self._failed(trouble)
        except Exception:  # the training continues even if the error cannot be reported
            return


_STARTED: weakref.WeakSet[SinkThread] = weakref.WeakSet()


def _before_fork() -> None:
    for delivery in list(_STARTED):
        delivery.let_settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _makes_a_row(fact: TimedEvent) -> bool:
    """Whether a fact gives a row, as far as that is known without computing it."""
    event = fact.event
    return isinstance(event, StepRow) or (isinstance(event, LayerSample) and event.scale is not None)


def _error_text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    try:
        lines = str(error).split("\n")
    except Exception:  # __str__ of a third-party class may raise
        lines = []
    first = next((line.strip() for line in lines if line.strip()), "(no message)")
    return f"{type(error).__name__}: {first[:LONGEST_ERROR]}"
