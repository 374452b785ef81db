"""Progress of a comparison: a bar on a terminal, elsewhere one line for each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ampwise.finding.terminal import console, printable, say
from ampwise.tune.compare.measurement import Progress

__all__ = ["progress_on"]


@contextmanager
def progress_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress | None]:
    """Yield the callback that shows progress; None if ``quiet``."""
    if quiet:
        yield None
    elif stream.isatty():
        yield from _bar(stream)
    else:
        yield _lines(stream)


def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console(stream), transient=True) as bar:
        task = bar.add_task("making the model", total=None)
        yield lambda done, total, doing: bar.update(task, completed=done, total=total, description=printable(doing))


def _lines(stream: TextIO) -> Progress:
    shown: set[str] = set()

    def report(done: int, total: int, doing: str) -> None:
        what = doing.partition(":")[0]
        if what not in shown:
            shown.add(what)
            say("ampwise: {} ({}/{})", what, done, total, stream=stream)
            stream.flush()

    return report
