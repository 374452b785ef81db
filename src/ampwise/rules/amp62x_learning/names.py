"""Names of parameters in a sentence."""

from collections.abc import Sequence

__all__ = ["listed"]


def listed(names: Sequence[str]) -> str:
    """Return the first name and the number of the others: "`head.weight` and 3 more parameters"."""
    first = f"`{names[0]}`" if names[0] else "a parameter"
    more = len(names) - 1
    return first + (f" and {more} more parameter{'s' * (more > 1)}" if more else "")
