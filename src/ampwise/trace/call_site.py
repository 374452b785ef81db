"""Find the line of the user's code that is running, skipping frames of torch and ampwise."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

from ampwise.finding.call_site import CallSite

__all__ = [
    "StackLine",
    "calling_site",
    "code_owner",
    "current_line",
    "is_recomputed",
    "own_files",
    "says",
    "site_of",
    "stop_stack_search",
]

SKIPPED_PACKAGES = ("torch", "ampwise")
MAX_FRAMES = 300
OWN, LIBRARY, SKIPPED, BACKWARD, OPTIMIZER, CHECKPOINT = range(6)  # kinds of code
Line = tuple[str, int, str]  # file, line, function
T = TypeVar("T")


class StackLine(NamedTuple):
    """The user's line and the library's line on the stack."""

    own: Line | None = None
    library: Line | None = None
    in_optimizer: bool = False


def calling_site() -> CallSite:
    """Return the innermost line of the user's own code; if there is none, that of the library that called torch."""
    own: Line | None = None
    library: Line | None = None
    span = None
    for frame in _frames():
        owner = code_owner(frame.f_code.co_filename)
        if owner == "own":
            if own is not None:
                return site_of(own, library, _line(frame), span)
            own, span = _line(frame), _span(frame.f_code, frame.f_lasti)
        elif owner == "library" and own is None and library is None:
            library = _line(frame)
    return site_of(own, library, None, span)


def current_line() -> StackLine:
    """Return the innermost line of the user's code, no further out than the call of a backward pass."""
    library, in_optimizer = None, False
    for frame in _frames():
        kind = _kind(frame.f_code)
        if kind == OWN:
            return StackLine(_line(frame), library, in_optimizer)
        if kind == BACKWARD:
            break
        if kind == LIBRARY and library is None:
            library = _line(frame)
        in_optimizer |= kind == OPTIMIZER
    return StackLine(None, library, in_optimizer)


def is_recomputed() -> bool:
    """Return whether activation checkpointing is recomputing a forward pass within the backward pass."""
    kinds = (_kind(frame.f_code) for frame in _frames())
    return next((kind for kind in kinds if kind in (BACKWARD, CHECKPOINT)), None) == CHECKPOINT


def stop_stack_search(function: T) -> T:
    """Decorate a function so that the search for the user's line stops at its frame."""
    _KINDS[function.__code__] = BACKWARD  # type: ignore[attr-defined]
    return function


@lru_cache(maxsize=4096)
def site_of(
    own: Line | None,
    library: Line | None,
    called_from: Line | None = None,
    span: tuple[int, int, int] | None = None,
) -> CallSite:
    """Return the line to show: the user's, the library's line that it called, and the line that called the user's.

    span: of the call in the user's line.
    """
    shown = own or library
    if shown is None:
        return CallSite()
    return CallSite(
        file=shown[0],
        line=shown[1],
        function=shown[2],
        through="" if library is None or own is None else f"{'/'.join(Path(library[0]).parts[-2:])}:{library[1]}",
        called_from="" if called_from is None else f"{Path(called_from[0]).name}:{called_from[1]}",
        span=span,
    )


def own_files(*words: str) -> list[str]:
    """Return the imported files of the script's own code that contain each of the words."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return sorted(file for file in files if file.endswith(".py") and code_owner(file) == "own" and says(file, *words))


def says(file: str, *words: str) -> bool:
    """Return whether the source of a file contains each of the words: to parse all of a large program takes seconds."""
    return all(word in _text(file) for word in words)


@cache
def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


@cache  # a large program has loaded thousands of files, and all are asked about
def code_owner(file: str) -> str:
    """Return whose code a file is: "own", "library" (installed) or "passed" (torch, ampwise, Python itself)."""
    if file.startswith("<") and not file.startswith("<ipython-input"):
        return "passed"  # <string>, <frozen runpy>: there is no line to show
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in SKIPPED_PACKAGES)
    if any(file.startswith(f"{Path(each).parent}/") for each in loaded if each):
        return "passed"
    if any(part in ("site-packages", "dist-packages") for part in Path(file).parts):
        return "library"
    # Installed programs, such as torchrun and ampwise itself, lie beside Python.
    installed = (f"{sysconfig.get_paths()['stdlib']}/", f"{Path(sys.executable).parent}/")
    return "passed" if file.startswith(installed) else "own"


_KINDS: dict[CodeType, int] = {}


def _kind(code: CodeType) -> int:
    kind = _KINDS.get(code)
    if kind is None:
        owner, file = code_owner(code.co_filename), code.co_filename.replace("\\", "/")
        if code.co_name == "_engine_run_backward" and file.endswith("torch/autograd/graph.py"):
            kind = BACKWARD
        elif owner != "passed":
            kind = OWN if owner == "own" else LIBRARY
        elif "/torch/optim/" in file:
            kind = OPTIMIZER
        else:
            kind = CHECKPOINT if file.endswith("torch/utils/checkpoint.py") else SKIPPED
        _KINDS[code] = kind
    return kind


def _frames() -> Iterator[FrameType]:
    """Yield the frames around the function that iterates, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=1024)
def _span(code: CodeType, instruction: int) -> tuple[int, int, int] | None:
    """Return column, end line and end column of the running call, as ``Place`` counts them; None if unknown."""
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if line is None or end_line is None or column is None or end_column is None:
        return None  # -X no_debug_ranges, or code without columns

    def characters(number: int, offset: int) -> int:  # Python counts bytes of UTF-8
        text = linecache.getline(code.co_filename, number).encode("utf-8", "surrogatepass")
        return len(text[:offset].decode("utf-8", "replace")) if len(text) >= offset else offset

    span = characters(line, column) + 1, end_line, characters(end_line, end_column) + 1
    return span if (end_line, span[2]) >= (line, span[0]) else None


def _line(frame: FrameType) -> Line:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
