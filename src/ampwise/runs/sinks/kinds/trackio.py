"""trackio on this machine. The target is the project; without a target, "ampwise".

If the script has its own run on this machine, rows are logged to that run, with their own steps. They are written to
trackio's database directly, because its ``log`` would advance the script's step counter and print.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from ampwise.runs.sinks.metrics import MetricsRow
from ampwise.runs.sinks.sink_context import Send, SinkContext

PACKAGE = "trackio"


def load() -> None:
    import trackio.context_vars
    import trackio.sqlite_storage  # noqa: F401


@contextmanager
def open_sink(about: SinkContext) -> Iterator[Send]:
    from trackio import context_vars
    from trackio.sqlite_storage import SQLiteStorage

    theirs = context_vars.current_run.get()
    if theirs is not None and theirs.url is None:  # on this machine
        project, run, run_id = theirs.project, theirs.name, theirs.id
    else:
        project = about.target or (theirs.project if theirs is not None else "ampwise")
        run, run_id = about.name, uuid.uuid4().hex

    def send(rows: Sequence[MetricsRow]) -> None:
        SQLiteStorage.bulk_log(
            project=project,
            run=run,
            run_id=run_id,
            metrics_list=[dict(row.metrics) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
        )

    yield send
