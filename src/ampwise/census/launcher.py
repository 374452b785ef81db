"""Whether there are kernels: Triton is optional, and missing from Windows and from builds for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.census.launch import Counted

__all__ = ["ALIGNMENT", "has_kernels", "launcher"]

ALIGNMENT = 16  # bytes: what kernels want of addresses, for vector loads


@cache
def launcher() -> Callable[..., Counted] | None:
    """``launch_census``, where Triton is installed."""
    try:
        from ampwise.census.launch import launch_census
    except ImportError:
        return None
    return launch_census


def has_kernels() -> bool:
    return launcher() is not None
