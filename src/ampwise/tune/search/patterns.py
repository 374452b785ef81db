"""Summarize names of modules as a few globs that match these and no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ampwise.train.precision.policy_table import brace_ranges

__all__ = ["globs", "spans"]


def globs(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return patterns that match all ``names`` and none of ``others``: numbers become ``*`` where possible.

    >>> globs(["blocks.0.up", "blocks.1.up", "head"], ["blocks.0.down", "blocks.1.down"])
    ['blocks.*.up', 'head']
    >>> globs(["layers.0", "layers.2"], ["layers.1"])
    ['layers.0', 'layers.2']
    """
    left = list(dict.fromkeys(names))
    found: list[str] = []
    while left:
        pattern = next(pattern for pattern in _patterns(left) if not _matched(pattern, others))
        found.append(pattern)
        left = [name for name in left if not fnmatchcase(name, pattern)]
    # A star also matches dots, so a later pattern may match all that an earlier one does.
    return [one for place, one in enumerate(found) if not _covered(_matched(one, names), found[place + 1 :])]


def spans(names: Iterable[str]) -> list[str]:
    """Abbreviate names for display: those that differ by one number become one.

    >>> spans(["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up", "head"])
    ['layers.{0..2,5}.up', 'head']
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
        alike.setdefault((*parts[:place], "", *parts[place + 1 :]), []).extend(parts[place : place + 1])
    return [
        ".".join(part or brace_ranges(sorted(map(int, numbers))) for part in parts if part or numbers)
        for parts, numbers in alike.items()
    ]


def _patterns(names: list[str]) -> Iterable[str]:
    """Yield patterns for the first name, widest first; the last one is the name itself."""
    parts = [re.sub(r"[*?[]", lambda sign: f"[{sign[0]}]", part) for part in names[0].split(".")]
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for count in range(len(numbers), 0, -1):
        starred = set(numbers[:count])
        pattern = ".".join("*" if place in starred else part for place, part in enumerate(parts))
        if len(_matched(pattern, names)) > 1:
            yield pattern
    yield ".".join(parts)


def _covered(names: Iterable[str], patterns: list[str]) -> bool:
    return all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names)


def _matched(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]
