"""The exceptions that ampwise raises.

    AmpwiseError
    ├── UnknownName          an unknown format, rule or device (also a LookupError)
    ├── BadInput             an invalid argument (also a ValueError)
    ├── UnsupportedTensor    a tensor that cannot be measured or cast (also a TypeError)
    ├── MissingDependency    an optional package is needed and not installed (also an ImportError)
    ├── PrecisionUnavailable a precision that the device does not support (also a RuntimeError)
    └── ScaleCollapsed       gradients overflow at the lowest loss scale allowed (also a FloatingPointError)

Every message says what was given, what is expected, and what to do. The command line prints it as one line
and exits with 2.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable

MUCH_WORSE = 0.15  # difference of two similarities, from 0 to 1

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
    """Base class of all exceptions that ampwise raises on purpose."""


class UnknownName(AmpwiseError, LookupError):
    """An unknown name, with suggestions of similar known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, listing: str) -> None:
        self.kind, self.name = kind, name
        self.nearest = nearest(name, known)
        guess = f"Did you mean {' or '.join(self.nearest)}? " if self.nearest else ""
        super().__init__(f"unknown {kind} {name!r}. {guess}{listing}")

    def __reduce__(self) -> tuple[object, ...]:
        # By default pickle calls the class with the message alone, and this class takes more arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class BadInput(AmpwiseError, ValueError):
    """An invalid argument."""


class UnsupportedTensor(AmpwiseError, TypeError):
    """A tensor without values that can be read, or of an unsupported type."""


class MissingDependency(AmpwiseError, ImportError):
    """An optional package is needed and not installed."""


class PrecisionUnavailable(AmpwiseError, RuntimeError):
    """A precision that the device does not support."""


class ScaleCollapsed(AmpwiseError, FloatingPointError):
    """Gradients are not finite even at the lowest loss scale allowed. The weights are unchanged."""


def needs_torch(name: str) -> MissingDependency:
    """Return the error for a public name that cannot be loaded without torch."""
    return MissingDependency(
        f"{name} needs torch, which is not installed. Install it with: pip install 'ampwise[torch]'"
    )


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known names most similar to ``name``, best first, ignoring case; those that it begins, if there are.

    >>> nearest("fp61", ["fp16", "bf16", "e4m3fn"]), nearest("ch", ["bench", "check", "checkpoints"])
    (['fp16'], ['check', 'checkpoints'])
    """
    from difflib import SequenceMatcher  # slow to import, and needed only for an error

    typed, names = name.strip().lower(), list(dict.fromkeys(known))
    if typed.strip("-") and (begun := [each for each in names if each.lower().startswith(typed)]):
        return sorted(begun, key=len)[:limit]
    scores = {each: SequenceMatcher(None, each.lower(), typed).ratio() for each in names}
    enough = max([0.5, *(score - MUCH_WORSE for score in scores.values())])  # no far-fetched one beside a good one
    close = sorted((each for each in names if scores[each] >= enough), key=lambda each: -scores[each])
    containing = [each for each in names if typed and typed in each.lower() and each not in close]
    return (close + containing)[:limit]
