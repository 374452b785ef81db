"""Showing a run until it has ended: a picture that changes in place, or, where nobody looks, a line now and then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ampwise.errors import BadInput
from ampwise.live.frame import Paper, curves, frame
from ampwise.live.looking import REST, Looking
from ampwise.live.state import Now, one_line, state_of
from ampwise.printers.terminal import PIPE_WIDTH, console, flush, say, wants_colour, write, writing
from ampwise.report.summary import summary

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ampwise.record.follow import Follower
    from ampwise.record.reader import Run

__all__ = ["has_ended", "looks", "show_once", "watch"]

ON_A_TERMINAL_S = 1.0  # between two looks
ELSEWHERE_S = 5.0
LONGEST_REST_S = 5.0  # of the longest records one wants to see something, too
PATIENCE_S = 180.0  # with a record that cannot be read: a disk comes back, one that was removed does not
LATE_S = 5.0  # after the first of several ranks has ended, within which their launcher adds what it found in them
PAUSE_S = 0.5  # between two looks for that


def watch(follower: Follower, stream: TextIO, *, interval_s: float | None = None) -> None:
    """Show the run until it has ended, then its summary; BadInput after that, where the record was lost instead."""
    looking = Looking(follower)
    if _is_screen(stream):
        _on_screen(looking, stream, interval_s or ON_A_TERMINAL_S)
    else:
        _in_lines(looking, stream, interval_s or ELSEWHERE_S)
    width = _screen(stream).width if stream.isatty() else PIPE_WIDTH
    write("\n" + summary(looking.run, colour=wants_colour(stream), width=width), stream)
    if looking.lost:
        flush(stream)
        raise BadInput(f"{follower.folder} {looking.lost} What was seen until then is above.")


def show_once(follower: Follower, stream: TextIO) -> None:
    """The run as it stands."""
    looking = Looking(follower)
    if not _is_screen(stream):
        _write_line(f"{one_line(_now(looking))}", stream)
        return
    screen = _screen(stream)
    with writing():
        _print(screen, frame(looking.run, _now(looking), _paper(screen)))


def looks(looking: Looking, interval_s: float) -> Iterator[Run]:
    """The run as it stands, again and again; at last as it ended, or was when it was lost for good."""
    began = time.perf_counter()
    while True:
        if has_ended(looking.run) and not looking.lost:
            _look_at_last(looking)
        yield looking.run
        if looking.lost_s > PATIENCE_S or (has_ended(looking.run) and not looking.lost):
            return
        took = time.perf_counter() - began
        time.sleep(max(interval_s, min(took * REST, LONGEST_REST_S)))
        began = time.perf_counter()
        looking.look()


def has_ended(run: Run) -> bool:
    """It wrote its end, or its process is no longer there; of one on another machine only the first can be told."""
    return run.alive is False


def _look_at_last(looking: Looking) -> None:
    """It may have written its end after the look, and gone before it was asked whether it lives.

    Of several ranks the launcher writes last: what shows only when all of them are seen together.
    """
    looking.look()
    size = looking.run.manifest.get("world_size")
    end = time.monotonic() + LATE_S
    while isinstance(size, int) and size > 1 and time.monotonic() < end and _was_just_written(looking):
        time.sleep(PAUSE_S)
        looking.look()


def _was_just_written(looking: Looking) -> bool:
    written = looking.follower.written
    return written is not None and time.time() - written < LATE_S


def _on_screen(looking: Looking, stream: TextIO, interval_s: float) -> None:
    """On a screen of its own, as an editor has: windows are resized, and what scrolls away cannot be taken back."""
    from rich.console import Group
    from rich.live import Live

    screen = _screen(stream)
    with Live(console=screen, screen=True, auto_refresh=False) as live, _leaving_in_order(live):
        for run in looks(looking, interval_s):
            lines = frame(run, _now(looking), _paper(screen))
            with writing():
                live.update(Group(*lines), refresh=True)
    # What was found is in the summary that follows, but the curves are not.
    with writing():
        _print(screen, curves(_now(looking), _paper(screen)))


@contextmanager
def _leaving_in_order(live: Live) -> Iterator[None]:
    """`kill` ends us as Ctrl-C does, and Ctrl-Z gives the screen back until we go on: by themselves both would leave
    the shell without a cursor, on a screen that is not its own."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what a shell reports for a program that the signal ended

    def pause(_: int, __: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        live.start(refresh=True)

    handlers = {"SIGTERM": leave, "SIGTSTP": pause} if threading.current_thread() is threading.main_thread() else {}
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_lines(looking: Looking, stream: TextIO, interval_s: float) -> None:
    told = ""
    for _ in looks(looking, interval_s):
        line = one_line(_now(looking))
        if line != told:
            _write_line(line, stream)
            told = line


def _now(looking: Looking) -> Now:
    return state_of(looking.run, written=looking.follower.written)


def _write_line(line: str, stream: TextIO) -> None:
    say("{}", line, stream=stream)
    flush(stream)


def _print(screen: Console, lines: list[Text]) -> None:
    for line in lines:
        screen.print(line, no_wrap=True, crop=True)


def _is_screen(stream: TextIO) -> bool:
    """A terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _screen(stream: TextIO) -> Console:
    """As wide as the terminal really is: a line that wraps would break the picture."""
    return console(stream, narrowest=0)


def _paper(screen: Console) -> Paper:
    size = screen.size  # asked anew each time: windows are resized
    return Paper(width=size.width, height=max(1, size.height - 1), encoding=screen.encoding)
