"""How far a comparison has come: a bar on a terminal, a line for each thing that is done elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ampwise.printers.terminal import console, printable, say
from ampwise.tune.compare.measuring import Progress

__all__ = ["progress_on"]


@contextmanager
def progress_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress | None]:
    """What to call with how far it is; None where nobody wants to know."""
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
    said: set[str] = set()

    def tell(done: int, total: int, doing: str) -> None:
        what = doing.partition(":")[0]
        if what not in said:
            said.add(what)
            say("ampwise: {} ({}/{})", what, done, total, stream=stream)
            stream.flush()

    return tell
