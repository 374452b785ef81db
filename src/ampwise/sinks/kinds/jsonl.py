"""A line of strict JSON for each row. inf and NaN, which JSON has not, are the strings that float() takes back.

The target is a file, which is added to. Without one, RUN.metrics.jsonl is written anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ampwise.sinks.about import About, Send
from ampwise.sinks.metrics import Row
from ampwise.sinks.places import why_no_file
from ampwise.strict_json import dumps

PACKAGE = None
SUFFIX = "metrics.jsonl"


def check(about: About) -> str | None:
    return why_no_file(about.path(SUFFIX))


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    path = about.path(SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if about.target else "w", encoding="utf-8") as file:

        def send(rows: Sequence[Row]) -> None:
            for row in rows:
                line = {"run": about.name, "step": row.step, "time": row.time, **row.metrics}
                file.write(dumps(line, indent=None))
            file.flush()

        yield send
