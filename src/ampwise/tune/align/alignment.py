"""Sizes that tensor cores load in whole words.

A word is 16 bytes: 8 elements of 16 bits, 4 of 32, 16 of 8. Rows of a matrix that start at word boundaries are loaded
whole. That affects only speed, except in FP8, whose matmul (``torch._scaled_mm``) requires it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampwise.errors import BadInput, UnknownName

__all__ = ["BYTES", "better_size", "common_stride", "multiple_for", "round_up"]

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # per element
WORD = 16  # bytes that tensor cores load at once
LINE = 128  # bytes of a cache line, which an A100 prefers: 64 elements of 16 bits
GROWTH = 0.01  # growth that is acceptable to reach a whole cache line


def multiple_for(precision: str, to: int | None = None) -> int:
    """Return what sizes must be multiples of: the elements in a word, or ``to`` if that is compatible.

    >>> multiple_for("bf16"), multiple_for("fp8"), multiple_for("tf32"), multiple_for("bf16", 64)
    (8, 16, 4, 64)
    """
    if precision not in BYTES:
        raise UnknownName("precision", precision, BYTES, listing=f"The precisions are {', '.join(BYTES)}.")
    needed = WORD // BYTES[precision]
    if to is None:
        return needed
    if isinstance(to, bool) or not isinstance(to, int) or to < 1 or to % needed:
        raise BadInput(
            f"to={to!r} is not a multiple of {needed}, which {precision} needs; use {needed}, {2 * needed}, 64 or 128."
        )
    return to


def better_size(size: int, precision: str, to: int | None = None) -> int:
    """Return the next aligned size, or the size itself: whole cache lines where that adds almost nothing.

    >>> better_size(50257, "bf16"), better_size(1001, "bf16"), better_size(1000, "bf16"), better_size(1000, "bf16", 64)
    (50304, 1008, 1000, 1024)
    """
    multiple = multiple_for(precision, to)
    if size % multiple == 0:
        return size
    in_lines = round_up(size, LINE // BYTES[precision])
    return in_lines if to is None and in_lines <= size * (1 + GROWTH) else round_up(size, multiple)


def common_stride(steps: Iterable[int]) -> int | None:
    """Return the greatest common divisor of the row strides of several matrices."""
    found = [step for step in steps if step]
    return math.gcd(*found) if found else None


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple, or the size itself if it is one."""
    return -(-size // multiple) * multiple
