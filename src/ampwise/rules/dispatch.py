"""Dispatch of evidence to rules, by the type of each check's argument."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ampwise.finding import Finding
from ampwise.rules import rules_in

__all__ = ["Check", "checks_for", "run_checks"]

Check = Callable[[Any], Iterator[Finding]]


def run_checks(evidence: Any, category: str) -> list[Finding]:
    """Return the findings of a category's rules for this evidence."""
    return [finding for check in checks_for(category).get(type(evidence), ()) for finding in check(evidence)]


@cache
def checks_for(category: str) -> dict[type, tuple[Check, ...]]:
    """Return the checks of a category, keyed by the evidence type they take."""
    found: dict[type, tuple[Check, ...]] = {}
    for module in rules_in(category):
        for check in _checks_in(module):
            (evidence, *_) = typing.get_type_hints(check).values()
            for kind in typing.get_args(evidence) or (evidence,):
                found[kind] = (*found.get(kind, ()), check)
    return found


def _checks_in(module: Any) -> list[Check]:
    """Return ``check`` and other functions with that prefix: a rule may have more than one."""
    return [value for name, value in vars(module).items() if name.startswith("check") and callable(value)]
