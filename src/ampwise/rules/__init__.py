"""The rules, one file each, found by looking: nobody keeps a list.

A rule file is a module with ``RULE = Rule(...)`` and ``check(evidence)``, which yields findings. Its room,
the folder it lies in, says what it looks at: source text, hardware, gradients. Importing a rule must not
import torch, so that ``ampwise rules`` and the linter start at once.

Other packages add rules through the entry-point group ``ampwise.rules``. The entry point's name is the room
and its value a module, or a package of modules, such as ours::

    [project.entry-points."ampwise.rules"]
    source = "my_package.amp_rules"

A plugin that is broken, or takes a code or name already in use, costs one warning line and nothing else.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from ampwise.errors import UnknownName
from ampwise.finding import Rule
from ampwise.rules import _plugins

__all__ = [
    "RegisteredRule",
    "all_rules",
    "built_in",
    "by_room",
    "find_rule",
    "registered",
    "rooms",
    "rules_about",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRule:
    """A rule, the room it belongs to, and the module whose ``check`` looks for it."""

    rule: Rule
    room: str
    module: ModuleType


def all_rules() -> list[Rule]:
    """Every rule, ours and the plugins', by code."""
    return [entry.rule for entry in registered()]


def find_rule(name: str) -> Rule:
    """The rule with this code or name, in any case; UnknownName, with the nearest, when there is none."""
    rules = all_rules()
    by_name = {key: rule for rule in rules for key in (rule.code.lower(), rule.name)}
    found = by_name.get(name.strip().lower())
    if found is None:
        known = [key for rule in rules for key in (rule.code, rule.name)]
        raise UnknownName("rule", name, known, listing="`ampwise rules` lists the rules.")
    return found


def rules_about(room: str) -> list[ModuleType]:
    """The modules whose ``check`` looks at one kind of evidence, by code; other rooms stay unloaded.

    Only when a plugin has rules for this room are all of ours loaded, to see that it takes no code of theirs.
    """
    if room not in rooms():
        raise UnknownName("room of rules", room, rooms(), listing=f"The rooms are {', '.join(rooms())}.")
    if _plugins.entry_points(room):
        return [entry.module for entry in registered() if entry.room == room]
    return [entry.module for entry in _room(room)]


def rooms() -> list[str]:
    """What rules can look at: the folders here."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.ispkg)


def by_room(entries: Iterable[RegisteredRule]) -> dict[str, list[RegisteredRule]]:
    """Rules under the room they belong to, rooms in the order of their first code."""
    grouped: dict[str, list[RegisteredRule]] = {}
    for entry in _by_code(entries):
        grouped.setdefault(entry.room, []).append(entry)
    return grouped


@functools.cache
def registered() -> tuple[RegisteredRule, ...]:
    """Every rule with its room and module, by code; plugins are loaded, and complained about, once."""
    entries = list(built_in())
    for room, module in _plugin_modules():
        entry = RegisteredRule(rule=module.RULE, room=room, module=module)
        clash = _clash(entry.rule, entries)
        if clash:
            _plugins.warn(f"left out {module.__name__}: {clash}")
        else:
            entries.append(entry)
    return _by_code(entries)


@functools.cache
def built_in() -> tuple[RegisteredRule, ...]:
    """The rules that come with ampwise, by code: what the documentation covers."""
    entries: list[RegisteredRule] = []
    for entry in (entry for room in rooms() for entry in _room(room)):
        clash = _clash(entry.rule, entries)
        if clash:  # a mistake of ours, so nothing may work until it is mended
            raise RuntimeError(f"{entry.module.__name__}: {clash}")
        entries.append(entry)
    return _by_code(entries)


def _clash(rule: Rule, entries: Iterable[RegisteredRule]) -> str | None:
    """Why ``rule`` cannot join ``entries``, or None when it can."""
    for other in entries:
        if rule.code == other.rule.code:
            return f"its code {rule.code} belongs to {other.rule.name} ({other.module.__name__})"
        if rule.name == other.rule.name:
            return f"its name {rule.name} belongs to {other.rule.code} ({other.module.__name__})"
    return None


@functools.cache
def _room(room: str) -> tuple[RegisteredRule, ...]:
    package = importlib.import_module(f"{__name__}.{room}")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = (importlib.import_module(module.name) for module in found)
    return _by_code(
        RegisteredRule(rule=module.RULE, room=room, module=module) for module in modules if hasattr(module, "RULE")
    )


def _plugin_modules() -> Iterator[tuple[str, ModuleType]]:
    known = rooms()
    for entry_point in _plugins.entry_points():
        if entry_point.name in known:
            yield from ((entry_point.name, module) for module in _plugins.modules(entry_point))
        else:
            _plugins.warn(
                f"left out {entry_point.value}: it is for the room {entry_point.name!r}, "
                f"and the rooms are {', '.join(known)}"
            )


def _by_code(entries: Iterable[RegisteredRule]) -> tuple[RegisteredRule, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.rule.code))
