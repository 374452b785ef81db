"""Rules as the linter lists them: what is needed to select one, without loading its file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from ampwise.finding import Rule

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["RuleEntry", "matching_rules", "rules_package"]


class RuleEntry:
    """What is needed to select a rule; its file is loaded only when ``module`` is read."""

    __slots__ = ("_home", "code", "name", "needs", "on_by_default")

    def __init__(
        self, code: str, name: str, on_by_default: bool, needs: Sequence[Sequence[str]], home: str | ModuleType
    ) -> None:
        self.code, self.name, self.on_by_default = code, name, on_by_default
        self.needs = needs  # words a file must contain, at least one of each group
        self._home = home

    @classmethod
    def of(cls, module: ModuleType) -> RuleEntry:
        """Build the entry of a rule whose file is already loaded."""
        rule: Rule = module.RULE
        return cls(rule.code, rule.name, rule.on_by_default, getattr(module, "NEEDS", ()), module)

    @property
    def module(self) -> ModuleType:
        """The module whose ``check`` implements the rule."""
        return importlib.import_module(self._home) if isinstance(self._home, str) else self._home


def matching_rules(data: bytes, rules: Iterable[RuleEntry]) -> list[RuleEntry]:
    """Return those of ``rules`` that can find something in a file with these bytes, judging by its words."""
    present: dict[str, bool] = {}  # many rules need the same word

    def has(word: str) -> bool:
        if word not in present:
            present[word] = word.encode() in data
        return present[word]

    return [rule for rule in rules if all(any(map(has, words)) for words in rule.needs)]


def rules_package() -> Any:
    """Import ``ampwise.rules`` by name, as a plugin is: the rules are built on this package."""
    return importlib.import_module("ampwise.rules")
