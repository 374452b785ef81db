"""Getting rows to a sink without the training ever waiting for it, or learning of its troubles."""

from __future__ import annotations

import atexit
import contextvars
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ampwise.evidence.delivery import SinkTrouble, When
from ampwise.sinks.metrics import Metrics, Told

if TYPE_CHECKING:
    from ampwise.sinks import Opening
    from ampwise.sinks.metrics import Row

__all__ = ["Delivery", "Fact"]

Fact = tuple[float, Told]  # with the time it became known, in seconds since 1970

MOST_WAITING = 10_000  # facts: a sink so far behind gets the newest, and is told of at the end
BATCH = 500  # that a sink gets at a time, where so many wait
LONGEST_ERROR = 500  # characters


class Delivery:
    """One sink. A queue of facts, and a thread that makes rows of them, opens the sink for the first, sends and closes.

    What FP16 loses of a model's gradients takes milliseconds to tell, which are the thread's and not the training's.

    Each sink has a thread of its own, so that one that hangs holds up no other. The threads are daemons: they keep no
    interpreter alive. A forked process has the delivery too, and sends nothing. failed: told once, of the first
    trouble. at_exit: called when the interpreter ends; known to it only after the first rows were sent, so that it
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
        self.sent = self.lost = 0

    def put(self, fact: Fact) -> None:
        """Hand a fact over; costs microseconds, and never raises."""
        if self._off or os.getpid() != self._pid:
            return
        try:
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

    def wait(self, until: float) -> None:
        """Until all is sent and the sink closed, or ``time.monotonic()`` has come to this."""
        if self._thread is None or os.getpid() != self._pid:
            return
        done = self._done.wait(max(0.0, until - time.monotonic()))
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if not done:
            self.lost += sum(fact is not None for fact in self._waiting())
            self._give_up(When.WAITING)
        elif self.lost:
            self._give_up(When.KEEPING_UP)

    def _start(self) -> None:
        # In the script's context, as some packages keep there which run of theirs is the present one.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name=f"ampwise-sink-{self._opening.label}", daemon=True
        )
        self._thread.start()

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
                    if self._at_exit is not None and not self.sent:
                        atexit.register(self._at_exit)
                    self.sent += len(rows)
                    rows = self._next()
                when = When.CLOSING
        except BaseException as error:  # SystemExit too: whatever a sink does, it is the end of the sink alone
            self._give_up(when, error)
        finally:
            self._done.set()

    def _next(self) -> list[Row]:
        """Rows in order, as soon as there are any; none at the end."""
        rows: list[Row] = []
        while not rows and (facts := self._next_facts()):
            every = (self._metrics.row(told, at) for at, told in facts)
            rows = [row for row in every if row is not None]
        return rows

    def _next_facts(self) -> list[Fact]:
        fact = self._facts.get()
        if fact is None:
            return []
        facts = [fact]
        while len(facts) < BATCH:
            try:
                fact = self._facts.get_nowait()
            except queue.Empty:
                break
            if fact is None:
                self._facts.put(None)  # for the next time
                break
            facts.append(fact)
        return facts

    def _waiting(self) -> list[Fact | None]:
        facts: list[Fact | None] = []
        try:
            while True:
                facts.append(self._facts.get_nowait())
        except queue.Empty:
            return facts

    def _drop_oldest(self) -> None:
        try:
            self._facts.get_nowait()
        except queue.Empty:  # it has caught up in this moment
            return
        self.lost += 1

    def _give_up(self, when: When, error: BaseException | None = None) -> None:
        """Nothing is sent any more, and one trouble is told: the first."""
        with self._lock:
            if self._off:
                return
            self._off = True
        self._waiting()
        told = SinkTrouble(sink=self._opening.label, when=when, error=_in_words(error), sent=self.sent, lost=self.lost)
        try:
            self._failed(told)
        except Exception:  # whoever wanted to know cannot be told; the training goes on
            return


def _in_words(error: BaseException | None) -> str | None:
    if error is None:
        return None
    try:
        lines = str(error).split("\n")
    except Exception:  # of a stranger's class
        lines = []
    first = next((line.strip() for line in lines if line.strip()), "(no message)")
    return f"{type(error).__name__}: {first[:LONGEST_ERROR]}"
