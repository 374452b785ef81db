"""JSON lines: one line of strict JSON per row. inf and NaN are written as strings that float() accepts.

The target is a file to append to. Without a target, RUN.metrics.jsonl is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ampwise.finding.strict_json import dumps
from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.sink_context import Send, SinkContext, why_file_not_writable

PACKAGE = None
SUFFIX = "metrics.jsonl"


def check(about: SinkContext) -> str | None:
    return why_file_not_writable(about.path(SUFFIX))


@contextmanager
def open_sink(about: SinkContext) -> Iterator[Send]:
    path = about.path(SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if about.target else "w", encoding="utf-8") as file:

        def send(rows: Sequence[MetricsRow]) -> None:
            for row in rows:
                line = {"run": about.name, "step": row.step, "time": row.time, **row.metrics}
                file.write(dumps(line, indent=None))
            file.flush()

        yield send
