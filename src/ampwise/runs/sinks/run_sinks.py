"""The sinks of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import StepRow
from ampwise.runs.sinks.delivery import SinkThread
from ampwise.runs.sinks.failure import SinkFailure
from ampwise.runs.sinks.metrics import SkipCounter, TimedEvent
from ampwise.runs.sinks.wait_limits import WaitLimits, wait_limits

if TYPE_CHECKING:
    from ampwise.runs.sinks import SinkRequest
    from ampwise.runs.sinks.metrics import SinkEvent

__all__ = ["Sinks"]


class Sinks:
    """Sends each event of a run to all sinks, without waiting and without raising.

    failed: called with an event for each sink that fails, once, from any thread. at_exit: see ``Delivery``.
    """

    def __init__(
        self,
        openings: Sequence[SinkRequest],
        failed: Callable[[LoggedEvent], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._report = failed
        self._deliveries = [SinkThread(opening, self._failed, at_exit) for opening in openings]
        self._skips = SkipCounter()
        self._patience = wait_limits()
        self._ended = self._closed = False

    def send(self, event: SinkEvent) -> None:
        """Send an event of the run; takes microseconds."""
        if not self._ended:
            fact = TimedEvent(time.time(), event, self._skips.rate(event) if isinstance(event, StepRow) else None)
            for delivery in self._deliveries:
                delivery.put(fact)

    def end(self) -> None:
        """Signal the end: the sinks send what is queued and close. Returns at once."""
        if not self._ended:
            self._ended = True
            for delivery in self._deliveries:
                delivery.end()

    def close(self, seconds: float | None = None) -> None:
        """Send what is queued and close the sinks; give up after the user's time limit, or ``seconds``."""
        self.end()
        if self._closed:
            return
        self._closed = True
        began = time.monotonic()
        limits = self._patience if seconds is None else WaitLimits(seconds, seconds)
        try:
            for delivery in self._deliveries:
                delivery.wait(began, limits)
        except KeyboardInterrupt:  # stop waiting
            for delivery in self._deliveries:
                delivery.wait(began, WaitLimits(0.0, 0.0))

    def _failed(self, failure: SinkFailure) -> None:
        self._report(failure.logged())
