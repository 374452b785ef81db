"""The sizes that matrix units load in whole words.

A word has 16 bytes: 8 elements of 16 bits, 4 of 32, 16 of 8. Rows of a matrix that begin at words are read whole. That
is a matter of speed, except in FP8, whose product (``torch._scaled_mm``) takes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampwise.errors import BadInput, UnknownName

__all__ = ["BYTES", "better", "multiple_for", "up_to", "worst_row"]

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # of an element as it is loaded
WORD = 16  # bytes that matrix units load at once
LINE = 128  # bytes of a line of memory: what an A100 prefers, and so 64 elements of 16 bits
GROWTH = 0.01  # that much more of a size is worth a whole line


def multiple_for(precision: str, to: int | None = None) -> int:
    """What sizes are to be multiples of: elements in a word, or what was asked for, if that fits.

    >>> multiple_for("bf16"), multiple_for("fp8"), multiple_for("tf32"), multiple_for("bf16", 64)
    (8, 16, 4, 64)
    """
    if precision not in BYTES:
        raise UnknownName("precision", precision, BYTES, listing=f"The precisions are {', '.join(BYTES)}.")
    needed = WORD // BYTES[precision]
    if to is None:
        return needed
    if isinstance(to, bool) or not isinstance(to, int) or to < 1 or to % needed:
        raise BadInput(f"to={to!r}: {precision} wants multiples of {needed}: {needed}, {2 * needed}, 64, 128.")
    return to


def better(size: int, precision: str, to: int | None = None) -> int:
    """The next size up that lies well, the size itself if it does: whole lines of memory where that adds next to
    nothing.

    >>> better(50257, "bf16"), better(1001, "bf16"), better(1000, "bf16"), better(1000, "bf16", 64)
    (50304, 1008, 1000, 1024)
    """
    multiple = multiple_for(precision, to)
    if size % multiple == 0:
        return size
    in_lines = up_to(size, LINE // BYTES[precision])
    return in_lines if to is None and in_lines <= size * (1 + GROWTH) else up_to(size, multiple)


def worst_row(steps: Iterable[int]) -> int | None:
    """Of the distances between rows of several matrices, one that is a multiple of no more than all of them are."""
    found = [step for step in steps if step]
    return math.gcd(*found) if found else None


def up_to(size: int, multiple: int) -> int:
    """The next multiple, or the size itself if it is one."""
    return -(-size // multiple) * multiple
