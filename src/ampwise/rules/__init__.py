"""Registry of the rules: one file each, found by walking the package, so there is no list to maintain.

A rule file is a module with ``RULE = Rule(...)`` and ``check(evidence)``, which yields findings. Its category, the
folder it is in, says what it examines: source text, hardware, gradients. Importing a rule must not import torch, so
that ``ampwise rules`` and the linter start quickly.

A rule about source may list in ``NEEDS`` the words a file must contain for the rule to find anything: at least one of
each tuple. A file that has no rule's words is skipped without parsing, and a rule whose words are in no file is never
loaded. ``index``, which ``make docs`` generates from the rule files and a test keeps up to date, holds those words.

Other packages add rules through the entry-point group ``ampwise.rules``. The entry point's name is the category and its
value a module, or a package of modules::

    [project.entry-points."ampwise.rules"]
    source = "my_package.amp_rules"

A problem that can be detected both in the source and at run time is one rule: a file in ``step`` imports the RULE of
the file in ``source`` and defines its own ``check``.

A plugin that is broken, or that uses a code or name already taken, causes one warning line and nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator

from ampwise.check.rule_entry import RuleEntry
from ampwise.errors import UnknownName
from ampwise.finding import Rule
from ampwise.finding.frozen import Frozen
from ampwise.rules import _plugins

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "RegisteredRule",
    "all_rules",
    "built_in",
    "by_category",
    "categories",
    "find_rule",
    "list_entries",
    "registered",
    "rules_in",
]


class RegisteredRule(Frozen):
    """A rule, its category, and the module whose ``check`` implements it."""

    __slots__ = ("rule", "category", "module")  # noqa: RUF023 (the order they are shown in)

    def __init__(self, *, rule: Rule, category: str, module: ModuleType) -> None:
        self.rule, self.category, self.module = rule, category, module


def all_rules() -> list[Rule]:
    """Return every rule, built-in and from plugins, sorted by code."""
    return [entry.rule for entry in registered()]


def find_rule(name: str) -> Rule:
    """Return the rule with this code or name, ignoring case; raise UnknownName, with the nearest name, if there is
    none.
    """
    rules = all_rules()
    by_name = {key: rule for rule in rules for key in (rule.code.lower(), rule.name)}
    found = by_name.get(name.strip().lower())
    if found is None:
        known = [key for rule in rules for key in (rule.code, rule.name)]
        raise UnknownName("rule", name, known, listing="`ampwise rules` lists the rules.")
    return found


def rules_in(category: str) -> list[ModuleType]:
    """Return the rule modules of one category, sorted by code; other categories stay unloaded.

    All built-in rules are loaded only when a plugin has rules in this category, to check that their codes do not clash.
    """
    if category not in categories():
        raise UnknownName(
            "rule category", category, categories(), listing=f"The categories are {', '.join(categories())}."
        )
    if _plugins.entry_points(category):
        return [entry.module for entry in registered() if entry.category == category]
    return [entry.module for entry in _rules_in_category(category)]


def list_entries(category: str) -> list[RuleEntry]:
    """Return the rules of one category without loading built-in rule files."""
    if _plugins.entry_points(category):
        return [RuleEntry.of(module) for module in rules_in(category)]
    from ampwise.rules.index import RULES

    return [
        RuleEntry(code, name, on_by_default, needs, f"{__name__}.{category}.{name.replace('-', '_')}")
        for code, name, on_by_default, needs in RULES[category]
    ]


def categories() -> list[str]:
    """Return the categories of rules: the subpackages of this package, but for ``evidence``, the data they check."""
    import pkgutil

    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.ispkg and found.name != "evidence")


def by_category(entries: Iterable[RegisteredRule]) -> dict[str, list[RegisteredRule]]:
    """Group rules by category, categories in the order of their first code."""
    grouped: dict[str, list[RegisteredRule]] = {}
    for entry in _by_code(entries):
        grouped.setdefault(entry.category, []).append(entry)
    return grouped


@functools.cache
def registered() -> tuple[RegisteredRule, ...]:
    """Return every rule with its category and module, sorted by code; plugins are loaded, and warned about, once."""
    entries = list(built_in())
    for category, module in _plugin_modules():
        entry = RegisteredRule(rule=module.RULE, category=category, module=module)
        clash = _clash(entry.rule, entries)
        if clash:
            _plugins.warn(f"{module.__name__}: {clash}")
        else:
            entries.append(entry)
    return _by_code(entries)


@functools.cache
def built_in() -> tuple[RegisteredRule, ...]:
    """Return the built-in rules, sorted by code: the ones the documentation covers."""
    entries: list[RegisteredRule] = []
    for entry in (entry for category in _by_ownership(categories()) for entry in _rules_in_category(category)):
        if any(entry.rule is other.rule for other in entries):
            continue  # one rule may have a check in several categories
        clash = _clash(entry.rule, entries)
        if clash:  # a bug in ampwise: fail loudly
            raise RuntimeError(f"{entry.module.__name__}: {clash}")
        entries.append(entry)
    return _by_code(entries)


def _by_ownership(found: Iterable[str]) -> list[str]:
    """Sort categories in the order in which they own a rule that several share: source first."""
    return sorted(found, key=lambda category: (category != "source", category != "hardware", category))


def _clash(rule: Rule, entries: Iterable[RegisteredRule]) -> str | None:
    """Return why ``rule`` cannot be added to ``entries``, or None when it can."""
    for other in entries:
        if rule.code == other.rule.code:
            return f"its code {rule.code} belongs to {other.rule.name} ({other.module.__name__})"
        if rule.name == other.rule.name:
            return f"its name {rule.name} belongs to {other.rule.code} ({other.module.__name__})"
    return None


@functools.cache
def _rules_in_category(category: str) -> tuple[RegisteredRule, ...]:
    import pkgutil

    package = importlib.import_module(f"{__name__}.{category}")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = (importlib.import_module(module.name) for module in found)
    return _by_code(
        RegisteredRule(rule=module.RULE, category=category, module=module)
        for module in modules
        if hasattr(module, "RULE")
    )


def _plugin_modules() -> Iterator[tuple[str, ModuleType]]:
    known = categories()
    for entry_point in _plugins.entry_points():
        if entry_point.name in known:
            yield from ((entry_point.name, module) for module in _plugins.modules(entry_point))
        else:
            _plugins.warn(
                f"{entry_point.value}: {entry_point.name!r} is not a rule category; the categories are "
                f"{', '.join(known)}"
            )


def _by_code(entries: Iterable[RegisteredRule]) -> tuple[RegisteredRule, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.rule.code))
