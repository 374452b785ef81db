"""Which rules look at which evidence, by the type of what their checks take."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ampwise.finding import Finding
from ampwise.rules import rules_about

__all__ = ["Check", "checks_of", "judged"]

Check = Callable[[Any], Iterator[Finding]]


def judged(evidence: Any, room: str) -> list[Finding]:
    """What the rules of a room find in this evidence."""
    return [finding for check in checks_of(room).get(type(evidence), ()) for finding in check(evidence)]


@cache
def checks_of(room: str) -> dict[type, tuple[Check, ...]]:
    """The checks of a room, by the kind of evidence that they take."""
    found: dict[type, tuple[Check, ...]] = {}
    for module in rules_about(room):
        for check in _checks_in(module):
            (evidence, *_) = typing.get_type_hints(check).values()
            for kind in typing.get_args(evidence) or (evidence,):
                found[kind] = (*found.get(kind, ()), check)
    return found


def _checks_in(module: Any) -> list[Check]:
    """``check``, and others named alike: a rule may be broken in more than one way."""
    return [value for name, value in vars(module).items() if name.startswith("check") and callable(value)]
