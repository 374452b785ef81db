"""The rules that check source code, and which of them can find something in a file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["matching_rules", "rules_package", "source_rules"]


def rules_package() -> Any:
    """Import ``ampwise.rules`` by name, as a plugin is: the rules are built on this package."""
    return importlib.import_module("ampwise.rules")


def source_rules() -> tuple[ModuleType, ...]:
    """Return the modules of the rules that check source code, sorted by code."""
    found: tuple[ModuleType, ...] = rules_package().source_rules()
    return found


def matching_rules(data: bytes, rules: Iterable[ModuleType]) -> list[ModuleType]:
    """Return those of ``rules`` that can find something in a file with these bytes, judging by its words.

    ``NEEDS`` of a rule lists groups of words; the file must contain at least one word of each group.
    """
    present: dict[str, bool] = {}  # many rules need the same word

    def has(word: str) -> bool:
        if word not in present:
            present[word] = word.encode() in data
        return present[word]

    return [rule for rule in rules if all(any(map(has, words)) for words in getattr(rule, "NEEDS", ()))]
