"""trackio, on this machine. The target is the project; without one, "ampwise".

If the script has a run of its own that stays on this machine, our rows go into that, with steps of their own. They are
written to trackio's database and not by its ``log``, which would move the script's counter of steps and print.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from ampwise.sinks.about import About, Send
from ampwise.sinks.metrics import Row

PACKAGE = "trackio"


def load() -> None:
    import trackio.context_vars
    import trackio.sqlite_storage  # noqa: F401


@contextmanager
def open_sink(about: About) -> Iterator[Send]:
    from trackio.sqlite_storage import SQLiteStorage

    project, run, run_id = _run(about)

    def send(rows: Sequence[Row]) -> None:
        SQLiteStorage.bulk_log(
            project=project,
            run=run,
            run_id=run_id,
            metrics_list=[dict(row.metrics) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
        )

    yield send


def _run(about: About) -> tuple[str, str, str]:
    """Project, name and id: the script's, unless that is on another machine, or a new one."""
    from trackio import context_vars

    theirs = context_vars.current_run.get()
    if theirs is not None and theirs.url is None:
        return theirs.project, theirs.name, theirs.id
    return about.target or (theirs.project if theirs is not None else "ampwise"), about.name, uuid.uuid4().hex
