"""Find the line of the user's code that called, skipping frames of torch and ampwise."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from ampwise.finding.call_site import CallSite

__all__ = ["calling_site", "code_owner"]

PASSED = ("torch", "ampwise")  # packages whose frames are skipped
DEEPEST = 200


def calling_site() -> CallSite:
    """Return the innermost line of the user's own code; if there is none, that of the library that called torch."""
    library: FrameType | None = None
    own: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEEPEST):
        if frame is None:
            break
        kind = code_owner(frame.f_code.co_filename)
        if kind == "own" and own is not None:
            return _site(*_line(own), _line(frame), _line(library))
        if kind == "own":
            own = frame
        elif kind == "library" and own is None and library is None:
            library = frame
        frame = frame.f_back
    if own is not None:
        return _site(*_line(own), None, _line(library))
    return CallSite() if library is None else _site(*_line(library), None, None)


Line = tuple[str, int, str]


def _line(frame: FrameType | None) -> Any:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(maxsize=4096)
def _site(file: str, line: int, function: str, called_from: Line | None, library: Line | None) -> CallSite:
    return CallSite(
        file=file,
        line=line,
        function=function,
        through="" if library is None else f"{_short(library[0])}:{library[1]}",
        called_from="" if called_from is None else f"{Path(called_from[0]).name}:{called_from[1]}",
    )


@lru_cache(maxsize=4096)
def code_owner(file: str) -> str:
    """Return whose code a file is: "own", "library" (installed) or "passed" (torch, ampwise, Python itself)."""
    if file.startswith("<") and not file.startswith("<ipython-input"):
        return "passed"  # <string>, <frozen runpy>: there is no line to show
    for folder in _package_folders():
        if file.startswith(folder):
            return "passed"
    if any(part in ("site-packages", "dist-packages") for part in Path(file).parts):
        return "library"
    return "passed" if file.startswith(_python_folder()) else "own"


@lru_cache(maxsize=1)
def _package_folders() -> tuple[str, ...]:
    loaded = (sys.modules.get(name) for name in PASSED)
    files = (getattr(module, "__file__", None) for module in loaded)
    return tuple(f"{Path(file).parent}/" for file in files if file)


@lru_cache(maxsize=1)
def _python_folder() -> str:
    return f"{sysconfig.get_paths()['stdlib']}/"


def _short(file: str | None) -> str:
    return "/".join(Path(file or "").parts[-2:])
