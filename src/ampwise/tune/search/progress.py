"""Progress of a search: a bar with the time left on a terminal, elsewhere a line for each trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from ampwise.finding.terminal import console, printable, say
from ampwise.report.formatting import format_duration

ENOUGH = 3  # passes before a time is estimated: the first ones take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """State of a search."""

    doing: str
    done: int  # passes
    expected: int  # estimated passes in all
    seconds_left: float | None


Progress = Callable[[SearchProgress], object]


class ProgressCounter:
    """Counts passes against the expected number, and reports progress."""

    def __init__(self, progress: Progress | None, done: Callable[[], int]) -> None:
        self._progress, self._done = progress, done
        self._began = time.monotonic()
        self.expected = 1  # passes

    def tell(self, doing: str) -> None:
        """Report what is being done, or a result."""
        if self._progress is None:
            return
        done, left = self._done(), None
        if ENOUGH <= done < self.expected:  # beyond that there is no estimate
            left = (time.monotonic() - self._began) / done * (self.expected - done)
        self.expected = max(self.expected, done + 1)
        self._progress(SearchProgress(doing=doing, done=done, expected=self.expected, seconds_left=left))


@contextmanager
def progress_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress | None]:
    """Yield the callback that shows progress; None if ``quiet``."""
    if quiet:
        yield None
    elif stream.isatty():
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        words = (TextColumn("{task.fields[left]}"), TextColumn("{task.description}", markup=False))
        with Bar(BarColumn(), TimeElapsedColumn(), *words, console=console(stream), transient=True) as bar:
            task = bar.add_task("making the model", total=None, left="")

            def show(state: SearchProgress) -> None:
                left = "" if state.seconds_left is None else f"about {_rough(state.seconds_left)} left"
                doing = printable(state.doing)
                bar.update(task, completed=state.done, total=state.expected, description=doing, left=left)

            yield show
    else:

        def line(state: SearchProgress) -> None:
            left = "" if state.seconds_left is None else f"; about {_rough(state.seconds_left)} left"
            say("ampwise: {}{}", state.doing, left, stream=stream)
            stream.flush()

        yield line


def _rough(seconds: float) -> str:
    """Format a rough duration.

    >>> _rough(0.2), _rough(41.7), _rough(600)
    ('1 s', '42 s', '10 min')
    """
    return f"{seconds / 60:.0f} min" if seconds >= 120 else format_duration(max(1.0, float(round(seconds))))
