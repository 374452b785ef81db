"""Type checks for values of a loaded state, which may come from an untrusted file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["has_compatible_type", "is_plain_number"]

LARGEST = 2**63  # larger integers overflow as floats


def has_compatible_type(saved: Any, present: Any) -> bool:
    """Return whether the saved value has a type that fits the present one. For a present None, any plain type fits.

    >>> has_compatible_type(0.1, 3), has_compatible_type((0.9, 1), (0.8, 0.9))
    (True, True)
    >>> has_compatible_type("0.1", 3), has_compatible_type([0.1, None], [0.2])
    (False, False)
    """
    if present is None:
        return saved is None or isinstance(saved, bool | str | list | tuple | dict) or is_plain_number(saved)
    if isinstance(present, bool):
        return saved is None or isinstance(saved, bool)  # None: torch chooses
    if isinstance(present, int | float | Tensor):
        return is_plain_number(saved) or (isinstance(saved, Tensor) and isinstance(present, Tensor))
    if isinstance(present, tuple | list) and type(saved) is type(present):
        models = present if len(saved) == len(present) else present[:1] * len(saved)
        return all(map(has_compatible_type, saved, models))
    return isinstance(saved, type(present))


def is_plain_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGEST)
