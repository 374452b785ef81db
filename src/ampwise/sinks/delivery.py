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

if TYPE_CHECKING:
    from ampwise.sinks import Opening
    from ampwise.sinks.metrics import Row

__all__ = ["Delivery"]

MOST_WAITING = 10_000  # rows: a sink so far behind gets the newest, and is told of at the end
BATCH = 500  # rows that a sink gets at a time, where so many wait
LONGEST_ERROR = 500  # characters


class Delivery:
    """One sink. A queue, and a thread that opens the sink at the first row, sends what waits, and closes it.

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
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()  # whose put a signal's handler may interrupt
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # not join(), which may take an interrupted wait for the thread's end
        self._lock = threading.Lock()
        self._pid, self._off = os.getpid(), False
        self.sent = self.lost = 0

    def put(self, row: Row) -> None:
        """Hand a row over; costs microseconds, and never raises."""
        if self._off or os.getpid() != self._pid:
            return
        try:
            if self._rows.qsize() >= MOST_WAITING:
                self._drop_oldest()
            self._rows.put(row)
            if self._thread is None:
                self._start()
        except Exception as error:  # no more threads, no more memory
            self._give_up(When.OPENING, error)

    def end(self) -> None:
        """No more rows; returns at once."""
        if self._thread is not None and os.getpid() == self._pid:
            self._rows.put(None)

    def wait(self, until: float) -> None:
        """Until all is sent and the sink closed, or ``time.monotonic()`` has come to this."""
        if self._thread is None or os.getpid() != self._pid:
            return
        done = self._done.wait(max(0.0, until - time.monotonic()))
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if not done:
            self.lost += sum(row is not None for row in self._waiting())
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
            with self._opening.open() as send:
                when = When.SENDING
                while rows := self._next():
                    send(rows)
                    if self._at_exit is not None and not self.sent:
                        atexit.register(self._at_exit)
                    self.sent += len(rows)
                when = When.CLOSING
        except BaseException as error:  # SystemExit too: whatever a sink does, it is the end of the sink alone
            self._give_up(when, error)
        finally:
            self._done.set()

    def _next(self) -> list[Row]:
        """Rows in order, as soon as there are any; none at the end."""
        row = self._rows.get()
        if row is None:
            return []
        rows = [row]
        while len(rows) < BATCH:
            try:
                row = self._rows.get_nowait()
            except queue.Empty:
                break
            if row is None:
                self._rows.put(None)  # for the next time
                break
            rows.append(row)
        return rows

    def _waiting(self) -> list[Row | None]:
        rows: list[Row | None] = []
        try:
            while True:
                rows.append(self._rows.get_nowait())
        except queue.Empty:
            return rows

    def _drop_oldest(self) -> None:
        try:
            self._rows.get_nowait()
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
