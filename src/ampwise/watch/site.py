"""Whose line it was: the frame that called, past torch's own and ours."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

from ampwise.evidence.conduct import Site

__all__ = ["caller", "kind_of"]

PASSED = ("torch", "ampwise")  # packages whose frames are never the place
DEEPEST = 200


def caller() -> Site:
    """The innermost line of the user's own code; if there is none, of whatever library called torch."""
    frame: FrameType | None = sys._getframe(1)
    library: Site | None = None
    for _ in range(DEEPEST):
        if frame is None:
            break
        kind = kind_of(frame.f_code.co_filename)
        if kind == "own":
            return _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, library)
        if kind == "library" and library is None:
            library = _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None)
        frame = frame.f_back
    return library or Site()


@lru_cache(maxsize=4096)
def _site(file: str, line: int, function: str, library: Site | None) -> Site:
    through = "" if library is None else f"{_short(library.file)}:{library.line}"
    return Site(file=file, line=line, function=function, through=through)


@lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """ "own", "library" (installed by someone) or "passed" (torch, ampwise, Python itself)."""
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
