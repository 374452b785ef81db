"""Show a run until it has ended: a live screen in a terminal, or a line now and then elsewhere."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ampwise.errors import BadInput
from ampwise.finding.terminal import PIPE_WIDTH, console, flush, output_errors, say, wants_colour, write
from ampwise.report.live.frame import TerminalSize, draw_curves, draw_frame
from ampwise.report.live.poller import PAUSE_FACTOR, RecordPoller
from ampwise.report.live.run_state import RunState, one_line, state_of
from ampwise.report.run_text import run_text
from ampwise.runs.reader import RecordFollower, Run

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

ON_A_TERMINAL_S = 1.0  # between two looks
ELSEWHERE_S = 5.0
LONGEST_REST_S = 5.0  # between two looks at a very large record
PATIENCE_S = 180.0  # with an unreadable record: a disk may come back, a removed record does not
LATE_S = 5.0  # after rank 0 has ended, in which the launcher adds findings about all ranks
PAUSE_S = 0.5  # between two looks for those


def watch(follower: RecordFollower, stream: TextIO, *, interval_s: float | None = None) -> None:
    """Show the run until it has ended, then its summary; then raise BadInput if the record became unreadable."""
    looking = RecordPoller(follower)
    if _is_screen(stream):
        _on_screen(looking, stream, interval_s or ON_A_TERMINAL_S)
    else:
        last_line = ""
        for _ in poll(looking, interval_s or ELSEWHERE_S):
            line = one_line(_now(looking))
            if line != last_line:
                _write_line(line, stream)
                last_line = line
    width = console(stream, narrowest=0).width if stream.isatty() else PIPE_WIDTH
    write("\n" + run_text(looking.run, colour=wants_colour(stream), width=width), stream)
    if looking.lost:
        flush(stream)
        raise BadInput(f"{follower.folder} {looking.lost} The last known state is above.")


def show_once(follower: RecordFollower, stream: TextIO) -> None:
    """Show the current state of the run."""
    looking = RecordPoller(follower)
    if not _is_screen(stream):
        _write_line(one_line(_now(looking)), stream)
        return
    screen = console(stream, narrowest=0)  # the terminal's real width: a wrapped line would break the layout
    _print(screen, draw_frame(looking.run, _now(looking), _size(screen)))


def poll(looking: RecordPoller, interval_s: float) -> Iterator[Run]:
    """Yield the run again and again, until it has ended or has been unreadable for too long."""
    began = time.perf_counter()
    while True:
        if has_ended(looking.run) and not looking.lost:
            _look_at_last(looking)
        yield looking.run
        if looking.lost_s > PATIENCE_S or (has_ended(looking.run) and not looking.lost):
            return
        took = time.perf_counter() - began
        time.sleep(max(interval_s, min(took * PAUSE_FACTOR, LONGEST_REST_S)))
        began = time.perf_counter()
        looking.look()


def has_ended(run: Run) -> bool:
    """Whether the run has recorded its end, or its process is gone; the latter is known only on the same machine."""
    return run.alive is False


def _look_at_last(looking: RecordPoller) -> None:
    """Read the record once more: the run may have written its end just before its process ended.

    With several ranks, the launcher writes last: findings about all ranks together.
    """
    looking.look()
    size = looking.run.manifest.get("world_size")
    end = time.monotonic() + LATE_S
    while isinstance(size, int) and size > 1 and time.monotonic() < end:
        written = looking.follower.written
        if written is None or time.time() - written >= LATE_S:
            return
        time.sleep(PAUSE_S)
        looking.look()


def _on_screen(looking: RecordPoller, stream: TextIO, interval_s: float) -> None:
    """Draw on the terminal's alternate screen, as an editor does, because a window may be resized."""
    from rich.console import Group
    from rich.live import Live

    screen = console(stream, narrowest=0)
    with Live(console=screen, screen=True, auto_refresh=False) as live, _restoring_screen(live):
        for run in poll(looking, interval_s):
            lines = draw_frame(run, _now(looking), _size(screen))
            with output_errors():
                live.update(Group(*lines), refresh=True)
    # The summary that follows has the findings, but not the curves.
    _print(screen, draw_curves(_now(looking), _size(screen)))


@contextmanager
def _restoring_screen(live: Live) -> Iterator[None]:
    """Restore the screen on `kill` and Ctrl-Z; by default both would leave the shell on the alternate screen, without a
    cursor."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as a shell reports it

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


def _now(looking: RecordPoller) -> RunState:
    return state_of(looking.run, written=looking.follower.written)


def _write_line(line: str, stream: TextIO) -> None:
    say("{}", line, stream=stream)
    flush(stream)


def _print(screen: Console, lines: list[Text]) -> None:
    with output_errors():
        for line in lines:
            screen.print(line, no_wrap=True, crop=True)


def _is_screen(stream: TextIO) -> bool:
    """Whether the stream is a terminal with a movable cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _size(screen: Console) -> TerminalSize:
    size = screen.size  # changes when the window is resized
    return TerminalSize(width=size.width, height=max(1, size.height - 1), encoding=screen.encoding)
