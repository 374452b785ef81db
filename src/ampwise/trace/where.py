"""Whose line an operation is: read from the frames that are running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

from ampwise.evidence.conduct import Site
from ampwise.site import kind_of

__all__ = ["Line", "is_recomputed", "line_here", "outermost", "site_of"]

DEEPEST = 300
T = TypeVar("T")
OWN, LIBRARY, PASSED, BACKWARD, OPTIMIZER, CHECKPOINT = range(6)


class Line(NamedTuple):
    """What the frames say. Files and lines only: a site is made of those that are asked for."""

    own: tuple[str, int, str] | None = None
    library: tuple[str, int, str] | None = None
    in_optimizer: bool = False


def line_here() -> Line:
    """The innermost line of the user's, no further out than the call of a backward pass."""
    library, in_optimizer = None, False
    for frame in _frames():
        kind = _kind(frame.f_code)
        if kind == OWN:
            return Line(_line(frame), library, in_optimizer)
        if kind == BACKWARD:
            break
        if kind == LIBRARY and library is None:
            library = _line(frame)
        in_optimizer |= kind == OPTIMIZER
    return Line(None, library, in_optimizer)


def is_recomputed() -> bool:
    """Whether what runs in a backward pass is a forward pass, once more, for activation checkpointing."""
    for frame in _frames():
        kind = _kind(frame.f_code)
        if kind in (BACKWARD, CHECKPOINT):
            return kind == CHECKPOINT
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(3)
    for _ in range(DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


_KINDS: dict[CodeType, int] = {}


def _kind(code: CodeType) -> int:
    kind = _KINDS.get(code)
    if kind is None:
        kind = _KINDS[code] = _judged(code)
    return kind


def outermost(function: T) -> T:
    """A decorator: frames further out than this function's are not the operation's."""
    _KINDS[function.__code__] = BACKWARD  # type: ignore[attr-defined]
    return function


def _judged(code: CodeType) -> int:
    file = code.co_filename.replace("\\", "/")
    if code.co_name == "_engine_run_backward" and file.endswith("torch/autograd/graph.py"):
        return BACKWARD
    whose = kind_of(code.co_filename)
    if whose != "passed":
        return OWN if whose == "own" else LIBRARY
    if "/torch/optim/" in file:
        return OPTIMIZER
    return CHECKPOINT if file.endswith("torch/utils/checkpoint.py") else PASSED


@lru_cache(maxsize=4096)
def site_of(own: tuple[str, int, str] | None, library: tuple[str, int, str] | None) -> Site:
    """A place to show: the user's line, and the library's that it went through, if it did."""
    shown = own or library
    if shown is None:
        return Site()
    through = "" if library is None or own is None else f"{'/'.join(library[0].split('/')[-2:])}:{library[1]}"
    return Site(file=shown[0], line=shown[1], function=shown[2], through=through)
