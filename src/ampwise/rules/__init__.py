"""The rules, one file each, found by looking: nobody keeps a list.

A rule file is a module with ``RULE = Rule(...)`` and ``check(evidence)``, which yields findings. Its room,
the folder it lies in, says what it looks at: source text, hardware, gradients. Importing a rule must not
import torch, so that ``ampwise rules`` and the linter start at once.

A rule about source may say in ``NEEDS`` which words a file must have for it to find anything: of each tuple
at least one. Files that no rule has words in are passed over unread, and rules that have none in any file stay
unloaded: ``index``, which ``make docs`` writes from the rule files and a test holds to them, has their words.

Other packages add rules through the entry-point group ``ampwise.rules``. The entry point's name is the room
and its value a module, or a package of modules, such as ours::

    [project.entry-points."ampwise.rules"]
    source = "my_package.amp_rules"

What can be seen in the source and when the script runs is one rule: a file in ``step`` imports the RULE of the file in
``source`` and brings a ``check`` of its own.

A plugin that is broken, or takes a code or name already in use, costs one warning line and nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence

from ampwise.errors import UnknownName
from ampwise.finding import Rule
from ampwise.frozen import Frozen
from ampwise.rules import _plugins

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "Listed",
    "RegisteredRule",
    "all_rules",
    "built_in",
    "by_room",
    "find_rule",
    "listed",
    "registered",
    "rooms",
    "rules_about",
    "with_words_in",
]


class RegisteredRule(Frozen):
    """A rule, the room it belongs to, and the module whose ``check`` looks for it."""

    __slots__ = ("rule", "room", "module")  # noqa: RUF023 (the order they are shown in)

    def __init__(self, *, rule: Rule, room: str, module: ModuleType) -> None:
        self.rule, self.room, self.module = rule, room, module


class Listed:
    """What must be known of a rule to choose it; its file is loaded only when ``module`` is asked for."""

    __slots__ = ("_home", "code", "name", "needs", "on_by_default")

    def __init__(
        self, code: str, name: str, on_by_default: bool, needs: Sequence[Sequence[str]], home: str | ModuleType
    ) -> None:
        self.code, self.name, self.on_by_default = code, name, on_by_default
        self.needs = needs  # the words without which it finds nothing: of each group at least one
        self._home = home

    @classmethod
    def of(cls, module: ModuleType) -> Listed:
        """A rule whose file is loaded already."""
        rule: Rule = module.RULE
        return cls(rule.code, rule.name, rule.on_by_default, getattr(module, "NEEDS", ()), module)

    @property
    def module(self) -> ModuleType:
        """The module whose ``check`` looks for it."""
        return importlib.import_module(self._home) if isinstance(self._home, str) else self._home


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


def listed(room: str) -> list[Listed]:
    """The same rules, with none of our files loaded that is not asked for."""
    if _plugins.entry_points(room):
        return [Listed.of(module) for module in rules_about(room)]
    from ampwise.rules.index import RULES

    return [
        Listed(code, name, on_by_default, needs, f"{__name__}.{room}.{name.replace('-', '_')}")
        for code, name, on_by_default, needs in RULES[room]
    ]


def with_words_in(data: bytes, rules: Iterable[Listed]) -> list[Listed]:
    """Those of ``rules`` that can find something in a file of these bytes, going by its words."""
    present: dict[str, bool] = {}  # many rules ask for the same word

    def has(word: str) -> bool:
        if word not in present:
            present[word] = word.encode() in data
        return present[word]

    return [rule for rule in rules if all(any(map(has, words)) for words in rule.needs)]


def rooms() -> list[str]:
    """What rules can look at: the folders here."""
    import pkgutil

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
    for entry in (entry for room in _by_first_home(rooms()) for entry in _room(room)):
        if any(entry.rule is other.rule for other in entries):
            continue  # what is seen in the source and when it runs is one rule, with a check for each
        clash = _clash(entry.rule, entries)
        if clash:  # a mistake of ours, so nothing may work until it is mended
            raise RuntimeError(f"{entry.module.__name__}: {clash}")
        entries.append(entry)
    return _by_code(entries)


def _by_first_home(found: Iterable[str]) -> list[str]:
    """Rooms in the order in which they claim a rule that several share: source text first."""
    return sorted(found, key=lambda room: (room != "source", room != "hardware", room))


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
    import pkgutil

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
