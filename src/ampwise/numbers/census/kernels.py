"""Whether there are Triton kernels: Triton is optional, and missing on Windows and in CPU builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.numbers.census.launch import PendingCensus

ALIGNMENT = 16  # bytes, as kernels need for vector loads


@cache
def launcher() -> Callable[..., PendingCensus] | None:
    """Return ``launch_census`` if Triton is installed, else None."""
    try:
        from ampwise.numbers.census.launch import launch_census
    except ImportError:
        return None
    return launch_census


def has_kernels() -> bool:
    """Return whether Triton is installed."""
    return launcher() is not None
