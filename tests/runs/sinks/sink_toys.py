"""Sinks, good and bad, and rows for them."""

import math
import threading
from contextlib import contextmanager
from pathlib import Path

from ampwise.runs.rows import StepRow
from ampwise.runs.sinks import SinkRequest
from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.run_sinks import SinkThreads
from ampwise.runs.sinks.sink_context import SinkContext

LOSSES = [0.5, math.nan, math.inf, -math.inf, 1e-30]


def steps(losses=LOSSES, **facts):
    return [StepRow(step=number, loss=loss, **facts) for number, loss in enumerate(losses, 1)]


def row(step=1, **metrics):
    return MetricsRow(step, 1_700_000_000.0 + step, metrics or {"ampwise/loss": 1.0})


def all_sinks(*requested_sinks, **options):
    """The sinks, and the findings they come to."""
    found = []
    return SinkThreads(requested_sinks, found.append, **options), found


class Toy:
    """A sink that keeps its rows, and may be told to fail, or held with the first of them until it may go."""

    def __init__(self, name="toy", fails="", held=False, error=None):
        self.name, self.fails = name, fails
        self.error = error or ValueError("the disk is full\nand more")
        self.rows, self.calls = [], []
        self.gate, self.may_go = threading.Event(), threading.Event()  # the gate is open once it was reached
        if not held:
            self.may_go.set()
        self.opening = SinkRequest(name, self.open_sink, SinkContext(base=Path("run").absolute()))

    def _do(self, what):
        self.calls.append(what)
        if self.fails == what:
            raise self.error

    @contextmanager
    def open_sink(self, about):
        self._do("open")

        def send(rows):
            self._do("send")
            self.gate.set()
            assert self.may_go.wait(120)
            self.rows += rows

        yield send
        self._do("close")
