"""All sinks of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ampwise.evidence.delivery import SinkTrouble
from ampwise.finding import Finding
from ampwise.rules.run.sink_failed import check
from ampwise.sinks.delivery import Delivery

if TYPE_CHECKING:
    from ampwise.sinks import Opening
    from ampwise.sinks.metrics import Told

__all__ = ["Sinks"]

PATIENCE = 5.0  # seconds that the end of a run waits for all sinks together


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
        self._closed = False

    def tell(self, told: Told) -> None:
        """A fact of the run; costs microseconds."""
        if not self._closed:
            fact = time.time(), told
            for delivery in self._deliveries:
                delivery.put(fact)

    def close(self, patience: float = PATIENCE) -> None:
        """Send what waits and close them; what takes longer than ``patience`` seconds is given up."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + patience
        for delivery in self._deliveries:
            delivery.end()
        try:
            for delivery in self._deliveries:
                delivery.wait(until)
        except KeyboardInterrupt:  # enough of waiting
            for delivery in self._deliveries:
                delivery.wait(0.0)

    def _failed(self, trouble: SinkTrouble) -> None:
        for finding in check(trouble):
            self._found(finding)
