"""Values of a saved state that may come from anybody: whether code that computes with one can compute with another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["is_alike", "is_number"]

LARGEST = 2**63  # of whole numbers: larger ones overflow as floats


def is_alike(saved: Any, present: Any) -> bool:
    """Whether the saved value is of the kind of the one that is there. Of None, nobody knows the kind.

    >>> is_alike(0.1, 3), is_alike((0.9, 1), (0.8, 0.9)), is_alike("0.1", 3), is_alike([0.1, None], [0.2])
    (True, True, False, False)
    """
    if present is None:
        return saved is None or isinstance(saved, bool | str | list | tuple | dict) or is_number(saved)
    if isinstance(present, bool):
        return saved is None or isinstance(saved, bool)  # flags that may be left to torch
    if isinstance(present, int | float | Tensor):
        return is_number(saved) or (isinstance(saved, Tensor) and isinstance(present, Tensor))
    if isinstance(present, tuple | list) and type(saved) is type(present):
        models = present if len(saved) == len(present) else present[:1] * len(saved)
        return all(map(is_alike, saved, models))
    return isinstance(saved, type(present))


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGEST)
