"""Writing to stderr while, or after, a script has run: if there is one, and never at a cost to the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from ampwise.printers import terminal

__all__ = ["on_stderr", "say_if_open"]


def say_if_open(template: str, *fields: object) -> None:
    """``terminal.say`` on stderr, if it can be written to."""
    on_stderr(lambda stream: terminal.say(template, *fields, stream=stream))


def on_stderr(show: Callable[[TextIO], None]) -> None:
    """Have ``show`` write to stderr. Where that cannot be done, nothing is shown.

    A script may have closed its streams or put others in their place. Neither a traceback nor the exit code may show
    that we had something to say.
    """
    stream = next((each for each in (getattr(sys, "stderr", None), sys.__stderr__) if _is_open(each)), None)
    if stream is None:
        return
    try:
        stream.flush()  # what is the script's own
    except Exception:
        return
    try:
        show(stream)
        stream.flush()
    except Exception:
        # What is left in the stream's buffer would fail once more as Python ends, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
        return not stream.closed and stream.isatty() in (True, False)
    except Exception:  # an object of the script's may raise anything
        return False
