"""All sinks of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ampwise.evidence.delivery import SinkTrouble
from ampwise.finding import Finding
from ampwise.record.rows import StepRow
from ampwise.rules.run.sink_failed import check
from ampwise.sinks.delivery import Delivery
from ampwise.sinks.metrics import Fact, Skips
from ampwise.sinks.patience import Patience, patience

if TYPE_CHECKING:
    from ampwise.sinks import Opening
    from ampwise.sinks.metrics import Told

__all__ = ["Sinks"]


class Sinks:
    """What is told goes to each of them as a row of metrics. None of it waits, and none of it raises.

    found: told of a sink that failed, once for each, from any thread. at_exit: see ``Delivery``.
    """

    def __init__(
        self,
        openings: Sequence[Opening],
        found: Callable[[Finding], None],
        at_exit: Callable[[], None] | None = None,
    ) -> None:
        self._found = found
        self._deliveries = [Delivery(opening, self._failed, at_exit) for opening in openings]
        self._skips = Skips()
        self._patience = patience()
        self._ended = self._closed = False

    def tell(self, told: Told) -> None:
        """A fact of the run; costs microseconds."""
        if not self._ended:
            fact = Fact(time.time(), told, self._skips.rate(told) if isinstance(told, StepRow) else None)
            for delivery in self._deliveries:
                delivery.put(fact)

    def end(self) -> None:
        """No more facts; what waits is sent, and then they are closed. Returns at once."""
        if not self._ended:
            self._ended = True
            for delivery in self._deliveries:
                delivery.end()

    def close(self, seconds: float | None = None) -> None:
        """Send what waits and close them. What takes longer than the user's patience, or ``seconds``, is given up."""
        self.end()
        if self._closed:
            return
        self._closed = True
        began = time.monotonic()
        have = self._patience if seconds is None else Patience(seconds, seconds)
        try:
            for delivery in self._deliveries:
                delivery.wait(began, have)
        except KeyboardInterrupt:  # enough of waiting
            for delivery in self._deliveries:
                delivery.wait(began, Patience(0.0, 0.0))

    def _failed(self, trouble: SinkTrouble) -> None:
        for finding in check(trouble):
            self._found(finding)
