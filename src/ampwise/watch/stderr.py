"""Write to stderr during or after a script's run, if it is open, and without affecting the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from ampwise.finding import terminal

__all__ = ["say_on_stderr", "write_to_stderr"]


def say_on_stderr(template: str, *fields: object) -> None:
    """Call ``terminal.say`` on stderr, if it can be written to."""
    write_to_stderr(lambda stream: terminal.say(template, *fields, stream=stream))


def write_to_stderr(show: Callable[[TextIO], None]) -> None:
    """Call ``show`` with stderr. If stderr cannot be written to, nothing is shown.

    A script may have closed or replaced its streams. A failure must not cause a traceback or change the exit code.
    """
    stream = next((each for each in (getattr(sys, "stderr", None), sys.__stderr__) if _is_open(each)), None)
    if stream is None:
        return
    try:
        stream.flush()  # the script's own output
    except Exception:
        return
    try:
        show(stream)
        stream.flush()
    except Exception:
        # Flushing the stream's buffer would fail again at Python's exit, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
        return not stream.closed and stream.isatty() in (True, False)
    except Exception:  # a replacement by the script may raise anything
        return False
