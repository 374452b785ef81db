"""What to say when the loss scale has reached its floor and gradients still overflow."""

from __future__ import annotations

from collections.abc import Mapping

from ampwise.census.algebra import Census
from ampwise.errors import ScaleCollapsed

__all__ = ["collapsed"]

SHOWN = 3  # parameters by name


def collapsed(floor: float, in_a_row: int, censuses: Mapping[str, Census]) -> ScaleCollapsed:
    """The error, with what the gradients of the last step say about the cause."""
    return ScaleCollapsed(
        f"GradScaler: gradients overflowed with the loss scale at its floor, min_scale={floor:g}, "
        f"{in_a_row} steps in a row. A lower scale cannot help; the weights are as they were before. "
        f"{_cause(censuses)} Look for what is not finite in the forward pass, train in BF16, which needs no scale, "
        "or set min_scale lower."
    )


def _cause(censuses: Mapping[str, Census]) -> str:
    bad = [name for name, census in censuses.items() if not census.finite]
    if not bad:
        return "The gradients of the last step are finite again."
    if len(bad) == len(censuses):
        return f"All {len(bad)} gradients have inf or NaN in them, so the loss itself was probably not finite."
    first, total = bad[-1], len(censuses)
    counts = ", ".join(f"{name} ({_counts(censuses[name])})" for name in bad[-SHOWN:])
    return (
        f"{len(bad)} of {total} gradients have inf or NaN in them; the last in the order of parameters: {counts}. "
        f"Backward runs from the last layer to the first, so look at {first} or just after it."
    )


def _counts(census: Census) -> str:
    return " and ".join(f"{count} {kind}" for count, kind in ((census.infs, "inf"), (census.nans, "NaN")) if count)
