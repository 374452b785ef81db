"""Showing a run until it has ended: a picture that changes in place, or, where nobody looks, a line now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ampwise.live.frame import Paper, curves, frame
from ampwise.live.state import one_line, state_of
from ampwise.printers.terminal import PIPE_WIDTH, flush, printable, wants_colour, write, writing
from ampwise.report.summary import summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["has_ended", "looks", "show_once", "watch"]

ON_A_TERMINAL_S = 1.0  # between two looks
ELSEWHERE_S = 5.0
REST = 9.0  # times as long as looking took: a watcher takes no more than a tenth of a core from the run,
LONGEST_REST_S = 5.0  # except from the longest, of which one wants to see something, too


def watch(follower: Follower, stream: TextIO, *, interval_s: float | None = None) -> None:
    """Show the run until it has ended, then its summary."""
    if _is_screen(stream):
        run = _on_screen(follower, stream, interval_s or ON_A_TERMINAL_S)
    else:
        run = _in_lines(follower, stream, interval_s or ELSEWHERE_S)
    width = _console(stream).width if stream.isatty() else PIPE_WIDTH
    write(f"\n{summary(run, colour=wants_colour(stream), width=width)}", stream)


def show_once(follower: Follower, stream: TextIO) -> None:
    """The run as it stands."""
    run = follower.look()
    assert run is not None  # the first look has all
    if not _is_screen(stream):
        _write_line(f"{one_line(state_of(run, written=follower.written))}", stream)
        return
    console = _console(stream)
    now = state_of(run, written=follower.written)
    with writing():
        _print(console, frame(run, now, _paper(console)))


def looks(follower: Follower, interval_s: float) -> Iterator[Run]:
    """The run as it stands, again and again; at last as it ended."""
    run: Run | None = None
    while True:
        began = time.perf_counter()
        run = follower.look() or run
        assert run is not None  # the first look has all
        ended = has_ended(run)
        if ended:  # and may have written its end after the look, and gone before it was asked whether it lives
            run = follower.look() or run
        yield run
        if ended:
            return
        took = time.perf_counter() - began
        time.sleep(max(interval_s, min(took * REST, LONGEST_REST_S)))


def has_ended(run: Run) -> bool:
    """It wrote its end, or its process is no longer there; of one on another machine only the first can be told."""
    return run.alive is False


def _on_screen(follower: Follower, stream: TextIO, interval_s: float) -> Run:
    from rich.console import Group
    from rich.live import Live

    console = _console(stream)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for run in looks(follower, interval_s):
            now, paper = state_of(run, written=follower.written), _paper(console)
            # What was found is in the summary that follows, but the curves are not.
            lines = curves(now, paper) if has_ended(run) else frame(run, now, paper)
            with writing():
                live.update(Group(*lines), refresh=True)
    return run


def _in_lines(follower: Follower, stream: TextIO, interval_s: float) -> Run:
    told = ""
    for run in looks(follower, interval_s):
        line = one_line(state_of(run, written=follower.written))
        if line != told:
            _write_line(line, stream)
            told = line
    return run


def _write_line(line: str, stream: TextIO) -> None:
    write(f"{printable(line)}\n", stream)
    flush(stream)


def _print(console: Console, lines: list[Text]) -> None:
    for line in lines:
        console.print(line, no_wrap=True, crop=True)


def _is_screen(stream: TextIO) -> bool:
    """A terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(stream: TextIO) -> Console:
    """As wide as the terminal really is: a line that wraps would break the picture."""
    from rich.console import Console

    return Console(file=stream, highlight=False, color_system="auto" if wants_colour(stream) else None)


def _paper(console: Console) -> Paper:
    size = console.size  # asked anew each time: windows are resized
    return Paper(width=size.width, height=max(1, size.height - 1), encoding=console.encoding)
