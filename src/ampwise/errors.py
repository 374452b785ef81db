"""The exceptions, as one tree.

    AmpwiseError
    ├── UnknownName          a format, rule or device nobody has heard of (also a LookupError)
    ├── BadInput             an argument that makes no sense (also a ValueError)
    ├── UnsupportedTensor    a tensor that cannot be measured or cast (also a TypeError)
    ├── MissingDependency    an optional package is needed and absent (also an ImportError)
    ├── PrecisionUnavailable a precision that the device cannot run (also a RuntimeError)
    └── ScaleCollapsed       gradients overflow at the lowest loss scale allowed (also a FloatingPointError)

Every message says what was asked, what is possible, and what to do. The command line prints it as one line
and exits with 2.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable

__all__ = [
    "AmpwiseError",
    "BadInput",
    "MissingDependency",
    "PrecisionUnavailable",
    "ScaleCollapsed",
    "UnknownName",
    "UnsupportedTensor",
]


class AmpwiseError(Exception):
    """The root: catch this to catch whatever ampwise raises on purpose."""


class UnknownName(AmpwiseError, LookupError):
    """A name that is in no catalog, with the nearest ones that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, listing: str) -> None:
        self.kind, self.name = kind, name
        self.nearest = nearest(name, known)
        guess = f"Did you mean {' or '.join(self.nearest)}? " if self.nearest else ""
        super().__init__(f"unknown {kind} {name!r}. {guess}{listing}")

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle would call the class with the message alone; this one takes more, and crosses processes too.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class BadInput(AmpwiseError, ValueError):
    """An argument that cannot be worked with."""


class UnsupportedTensor(AmpwiseError, TypeError):
    """A tensor of a kind that has no values to look at, or none that make sense here."""


class MissingDependency(AmpwiseError, ImportError):
    """An optional package is needed for what was asked."""


class PrecisionUnavailable(AmpwiseError, RuntimeError):
    """A precision was asked for that the device has no means to run."""


class ScaleCollapsed(AmpwiseError, FloatingPointError):
    """No loss scale helps: gradients are not finite at the lowest one allowed. The weights are untouched."""


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names most like ``name``, best first, ignoring case.

    >>> nearest("fp61", ["fp16", "bf16", "e4m3fn"])
    ['fp16', 'bf16']
    """
    import difflib  # which only a mistake pays for

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    containing = [lower for lower in by_lower if name and name.lower() in lower and lower not in close]
    return [by_lower[lower] for lower in (close + containing)[:limit]]
