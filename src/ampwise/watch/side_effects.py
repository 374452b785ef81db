"""Refuse what code that is run again must not do: write files, start processes, use the network, take too long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["SideEffect", "side_effects_refused"]

REFUSED = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.chown"),
    *("os.utime", "os.putenv", "os.unsetenv", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("os.kill", "os.chdir", "subprocess.", "socket.", "shutil.", "sqlite3.", "signal.", "webbrowser.", "tempfile."),
    *("_thread.start_new_thread", "winreg.", "input", "builtins.input", "ftplib.", "smtplib.", "urllib."),
)
ENDING = (__file__, contextlib.__file__)  # code that ends the context
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_refusing = threading.local()
_installed: list[bool] = []


class SideEffect(BaseException):
    """Code that is run again would have an effect, or takes too long; the script's own code does not catch it."""


@contextlib.contextmanager
def side_effects_refused(until: float) -> Iterator[None]:
    """Within the context, refuse what this thread would change outside; until: ``time.monotonic()`` when time is over.

    What is refused ends the context with a RuntimeError.
    """
    if not _installed:  # it cannot be removed
        sys.addaudithook(_audit)
        _installed.append(True)
    writes_bytecode, profiler = sys.dont_write_bytecode, sys.getprofile()

    def look(frame: Any, event: str, argument: Any) -> None:
        if time.monotonic() > until and frame.f_code.co_filename not in ENDING:
            raise SideEffect

    sys.dont_write_bytecode = True
    _refusing.on = True
    if profiler is None:
        sys.setprofile(look)
    try:
        yield
    except SideEffect as error:
        raise RuntimeError("it cannot be run again") from error
    finally:
        if profiler is None:
            sys.setprofile(None)
        _refusing.on = False
        sys.dont_write_bytecode = writes_bytecode


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_refusing, "on", False):
        return
    if event == "open":
        _, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & WRITING):
            raise SideEffect
    elif event.startswith(REFUSED):
        raise SideEffect
