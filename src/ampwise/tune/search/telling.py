"""How far a search has come: a bar with the time left on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from ampwise.printers.terminal import console, printable, say
from ampwise.report.wording import duration

__all__ = ["Pace", "Progress", "Told", "progress_on"]

ENOUGH = 3  # passes, before which nothing is said about the time: the first ones take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Where a search is."""

    doing: str
    done: int  # passes
    expected: int  # passes in all, as far as one can tell
    seconds_left: float | None


Progress = Callable[[Told], object]


class Pace:
    """Counts passes against what is expected, and tells."""

    def __init__(self, progress: Progress | None, done: Callable[[], int]) -> None:
        self._progress, self._done = progress, done
        self._began = time.monotonic()
        self.expected = 1  # passes

    def tell(self, doing: str) -> None:
        """What is being done, or has just come out."""
        if self._progress is None:
            return
        done, left = self._done(), None
        if ENOUGH <= done < self.expected:  # beyond that nobody knows
            left = (time.monotonic() - self._began) / done * (self.expected - done)
        self.expected = max(self.expected, done + 1)
        self._progress(Told(doing=doing, done=done, expected=self.expected, seconds_left=left))


@contextmanager
def progress_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress | None]:
    """What to call with where it is; None where nobody wants to know."""
    if quiet:
        yield None
    elif stream.isatty():
        yield from _bar(stream)
    else:
        yield lambda told: _line(told, stream)


def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    words = (TextColumn("{task.fields[left]}"), TextColumn("{task.description}", markup=False))
    with Bar(BarColumn(), TimeElapsedColumn(), *words, console=console(stream), transient=True) as bar:
        task = bar.add_task("making the model", total=None, left="")

        def tell(told: Told) -> None:
            left = "" if told.seconds_left is None else f"about {_rough(told.seconds_left)} left"
            bar.update(task, completed=told.done, total=told.expected, description=printable(told.doing), left=left)

        yield tell


def _line(told: Told, stream: TextIO) -> None:
    left = "" if told.seconds_left is None else f"; about {_rough(told.seconds_left)} left"
    say("ampwise: {}{}", told.doing, left, stream=stream)
    stream.flush()


def _rough(seconds: float) -> str:
    """
    >>> _rough(0.2), _rough(41.7), _rough(600)
    ('1 s', '42 s', '10 min')
    """
    return f"{seconds / 60:.0f} min" if seconds >= 120 else duration(max(1.0, float(round(seconds))))
