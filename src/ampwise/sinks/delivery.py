"""Getting rows to a sink without the training ever waiting for it, or learning of its troubles."""

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

from ampwise.evidence.delivery import SinkTrouble, When
from ampwise.record.rows import LayerSample, StepRow
from ampwise.sinks.metrics import Fact, Metrics

if TYPE_CHECKING:
    from ampwise.sinks import Opening
    from ampwise.sinks.metrics import Row
    from ampwise.sinks.patience import Patience

__all__ = ["Delivery"]

MOST_WAITING = 10_000  # facts: a sink so far behind gets the newest, and is told of at the end
MOST_SAMPLES = 16  # of all layers, among them: a large model's takes megabytes
BATCH = 500  # that a sink gets at a time, where so many wait
LONGEST_ERROR = 500  # characters
LONGEST_BEFORE_FORKS = 2.0  # seconds, all forks together


class Delivery:
    """One sink. A queue of facts, and a thread that makes rows of them, opens the sink for the first, sends and closes.

    What FP16 loses of a model's gradients takes milliseconds to tell, which are the thread's and not the training's.

    Each sink has a thread of its own, so that one that hangs holds up no other. The threads are daemons: they keep no
    interpreter alive. A forked process has the delivery too, and sends nothing. failed: told once, of the first
    trouble. at_exit: called when the interpreter ends; registered again after the first rows were sent, so that it
    comes before what the sink's own package does then.
    """

    def __init__(
        self,
        opening: Opening,
        failed: Callable[[SinkTrouble], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._opening, self._failed, self._at_exit = opening, failed, at_exit
        self._facts: queue.SimpleQueue[Fact | None] = queue.SimpleQueue()  # whose put a signal's handler may interrupt
        self._metrics = Metrics()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # not join(), which may take an interrupted wait for the thread's end
        self._lock = threading.Lock()
        self._pid, self._off = os.getpid(), False
        self._samples: deque[None] = deque()  # one for each that waits: what has no lock, a signal's handler may change
        self._settled = threading.Event()  # it is open and has taken rows: it imports no more
        self._before_forks = LONGEST_BEFORE_FORKS
        self._in_hand = 0  # rows that are being sent
        self._moved = 0.0  # when something was done last
        self.sent = self.lost = 0

    def put(self, fact: Fact) -> None:
        """Hand a fact over; costs microseconds, and never raises."""
        if self._off or os.getpid() != self._pid:
            return
        try:
            if isinstance(fact.told, LayerSample):
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
            self._give_up(When.OPENING, error)

    def end(self) -> None:
        """No more rows; returns at once."""
        if self._thread is not None and os.getpid() == self._pid:
            self._facts.put(None)

    def wait(self, began: float, patience: Patience) -> None:
        """Until all is sent and the sink closed, or it has tried our patience. began: a time of ``time.monotonic``."""
        if self._thread is None or os.getpid() != self._pid or self._is_here():
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
            self._give_up(When.WAITING)
            self._facts.put(None)  # it may still close what it has opened

    def let_settle(self) -> None:
        """Wait, a little, until it imports no more: a process forked now would never come by those modules."""
        if os.getpid() != self._pid or self._is_here() or self._before_forks <= 0.0:
            return
        began = time.monotonic()
        self._settled.wait(self._before_forks)
        self._before_forks -= time.monotonic() - began

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        # In the script's context, as some packages keep there which run of theirs is the present one.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name=f"ampwise-sink-{self._opening.label}", daemon=True
        )
        self._call_at_exit()
        _STARTED.add(self)
        self._thread.start()

    def _call_at_exit(self) -> None:
        """What was registered last is called first."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def _work(self) -> None:
        when = When.OPENING
        try:
            rows = self._next()
            if not rows:
                return
            with self._opening.open() as send:
                when = When.SENDING
                while rows:
                    send(rows)
                    self._has_sent(rows)
                    rows = self._next()
                when = When.CLOSING
            if self.lost:
                self._give_up(When.KEEPING_UP)
        except BaseException as error:  # SystemExit too: whatever a sink does, it is the end of the sink alone
            self._give_up(when, error)
        finally:
            self._settled.set()
            self._done.set()

    def _has_sent(self, rows: list[Row]) -> None:
        if not self.sent:
            self._settled.set()
            self._call_at_exit()
        self.sent += len(rows)
        self._in_hand, self._moved = 0, time.monotonic()

    def _next(self) -> list[Row]:
        """Rows in order, as soon as there are any; none at the end."""
        rows: list[Row] = []
        while not rows and (facts := self._next_facts()):
            self._in_hand = sum(map(_makes_a_row, facts))
            rows = [row for row in map(self._metrics.row, facts) if row is not None]
            self._in_hand = len(rows)
        return rows

    def _next_facts(self) -> list[Fact]:
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

    def _taken(self, fact: Fact) -> Fact:
        if isinstance(fact.told, LayerSample):
            self._samples.pop()
        return fact

    def _drop_oldest(self) -> bool:
        """Whether there was one: it may have caught up in this moment."""
        try:
            fact = self._facts.get_nowait()
        except queue.Empty:
            return False
        if fact is not None:
            self.lost += _makes_a_row(self._taken(fact))
        return True

    def _give_up(self, when: When, error: BaseException | None = None) -> None:
        """Nothing is sent any more, and one trouble is told: the first."""
        with self._lock:
            if self._off:
                return
            self._off = True
        while self._drop_oldest():
            pass
        told = SinkTrouble(
            sink=self._opening.label,
            when=when,
            error=_in_words(error),
            sent=self.sent,
            lost=self.lost + self._in_hand,
            in_hand=self._in_hand,
        )
        try:
            self._failed(told)
        except Exception:  # whoever wanted to know cannot be told; the training goes on
            return


_STARTED: weakref.WeakSet[Delivery] = weakref.WeakSet()


def _before_fork() -> None:
    for delivery in list(_STARTED):
        delivery.let_settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _makes_a_row(fact: Fact) -> bool:
    """As far as can be told without making it."""
    told = fact.told
    return isinstance(told, StepRow) or (isinstance(told, LayerSample) and told.scale is not None)


def _in_words(error: BaseException | None) -> str | None:
    if error is None:
        return None
    try:
        lines = str(error).split("\n")
    except Exception:  # of a stranger's class
        lines = []
    first = next((line.strip() for line in lines if line.strip()), "(no message)")
    return f"{type(error).__name__}: {first[:LONGEST_ERROR]}"
