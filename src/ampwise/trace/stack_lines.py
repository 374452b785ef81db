"""Find the source line that runs an operation, from the Python stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner

__all__ = ["StackLine", "current_line", "is_recomputed", "site_of", "stop_stack_search"]

MAX_FRAMES = 300
T = TypeVar("T")
OWN, LIBRARY, SKIPPED, BACKWARD, OPTIMIZER, CHECKPOINT = range(6)


class StackLine(NamedTuple):
    """The user's line and the library's line on the stack, each as file, line and function."""

    own: tuple[str, int, str] | None = None
    library: tuple[str, int, str] | None = None
    in_optimizer: bool = False


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
    for frame in _frames():
        kind = _kind(frame.f_code)
        if kind in (BACKWARD, CHECKPOINT):
            return kind == CHECKPOINT
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(3)
    for _ in range(MAX_FRAMES):
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
        kind = _KINDS[code] = _classify(code)
    return kind


def stop_stack_search(function: T) -> T:
    """Decorate a function so that the search for the user's line stops at its frame."""
    _KINDS[function.__code__] = BACKWARD  # type: ignore[attr-defined]
    return function


def _classify(code: CodeType) -> int:
    file = code.co_filename.replace("\\", "/")
    if code.co_name == "_engine_run_backward" and file.endswith("torch/autograd/graph.py"):
        return BACKWARD
    whose = code_owner(code.co_filename)
    if whose != "passed":
        return OWN if whose == "own" else LIBRARY
    if "/torch/optim/" in file:
        return OPTIMIZER
    return CHECKPOINT if file.endswith("torch/utils/checkpoint.py") else SKIPPED


@lru_cache(maxsize=4096)
def site_of(own: tuple[str, int, str] | None, library: tuple[str, int, str] | None) -> CallSite:
    """Return the line to show: the user's, and the library's line that it called, if any."""
    shown = own or library
    if shown is None:
        return CallSite()
    through = "" if library is None or own is None else f"{'/'.join(library[0].split('/')[-2:])}:{library[1]}"
    return CallSite(file=shown[0], line=shown[1], function=shown[2], through=through)
