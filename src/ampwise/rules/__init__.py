"""The rules: one file each, with the rule's text and every check of it.

A rule file has ``RULE = Rule(...)`` and one or more functions whose names begin with ``check_``. The annotation of a
check's argument says what it examines: ``check_source(code: SourceFile)`` a script, ``check_event(clip: Clip)`` a call
in a running one, ``check_op(failure: Failure)`` the origin of a NaN. ``run_checks(record)`` calls every check of that
type. There is no list to maintain: rule files are found by scanning the folders below this one.

Types are imported under ``if TYPE_CHECKING:``, because most of them belong to packages that import this one, and so
that loading every rule takes milliseconds and does not load torch.

Other packages add rules through the entry-point group ``ampwise.rules``; the value is a module, or a package of
modules, and the name is free::

    [project.entry-points."ampwise.rules"]
    acme = "acme.amp_rules"
"""

from __future__ import annotations

import functools
import importlib
import os

from ampwise.errors import UnknownName
from ampwise.finding import Finding, Rule

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType
    from typing import Any

    Check = Callable[[Any], Iterator[Finding]]

__all__ = [
    "all_rules",
    "built_in_rules",
    "checks_for",
    "checks_of",
    "find_rule",
    "found_by",
    "rule_groups",
    "rule_modules",
    "run_checks",
    "source_rules",
]

ROOT = os.path.dirname(__file__)  # noqa: PTH120 (pathlib takes longer to load than all rules)
SOURCE_CHECK = "check_source"
# Codes of rules that were removed (messages of the guard and of sinks, now log events): they get no second meaning.
RETIRED_CODES = tuple(f"AMP{number}" for number in (801, 802, 803, 804, 805, 806, 809, 812, 813, 815, 816))
# The names that a check may have, each with what runs it.
RUN_BY: dict[str, tuple[str, ...]] = {
    SOURCE_CHECK: ("ampwise check",),
    "check_event": ("ampwise run",),  # one call of a running script
    "check_run": ("ampwise run",),  # all of a running script's calls
    "check_gradients": ("ampwise run",),
    "check_time": ("ampwise run",),
    "check_op": ("ampwise replay", "ampwise run", "ampwise.trace", "ampwise.Engine"),
    "check_float8": ("ampwise.Engine",),
    "check_guard": ("ampwise.Guard",),
    "check_hardware": ("ampwise gpu",),
    "check_matmuls": ("ampwise align",),
    "check_speed": ("ampwise compare",),
    "check_difference": ("ampwise diff",),
    "check_choice": ("ampwise advise",),
}


def all_rules() -> list[Rule]:
    """Return every rule, built-in and from plugins, sorted by code."""
    return [module.RULE for module in rule_modules()]


def built_in_rules() -> list[Rule]:
    """Return the rules of ampwise itself, sorted by code: the ones the documentation covers."""
    return [module.RULE for module in _built_in()]


def find_rule(name: str) -> Rule:
    """Return the rule with this code or name, ignoring case; raise UnknownName, with the nearest name, if there is
    none.
    """
    wanted = name.strip().lower()
    for rule in all_rules():
        if wanted in (rule.code.lower(), rule.name):
            return rule
    known = [key for rule in all_rules() for key in (rule.code, rule.name)]
    raise UnknownName("rule", name, known, listing="`ampwise explain` lists the rules.")


def found_by(rule: Rule) -> list[str]:
    """Return what can find a violation of this rule: ``["ampwise check", "ampwise run"]``.

    A rule without a check answers a claim, in the table of `ampwise advise`.
    """
    module = next((module for module in rule_modules() if rule == module.RULE), None)
    if module is None:
        return []
    names = [check.__name__ for check in checks_of(module)] or ["check_choice"]
    kinds = [kind for kind in RUN_BY if any(_is_kind(name, kind) for name in names)]
    return list(dict.fromkeys(by for kind in kinds for by in RUN_BY[kind]))


def _is_kind(name: str, kind: str) -> bool:
    """Return whether a check has this kind: ``check_event``, or ``check_event_scaler`` if a rule has several."""
    return name == kind or name.startswith(f"{kind}_")


def run_checks(record: Any) -> list[Finding]:
    """Return the findings of every rule that examines records of this type."""
    return [finding for check in checks_for(type(record)) for finding in check(record)]


def checks_for(kind: type) -> tuple[Check, ...]:
    """Return the checks whose argument has this type, sorted by the code of their rule."""
    return _checks_by_type().get(kind.__name__, ())


@functools.cache
def _checks_by_type() -> dict[str, tuple[Check, ...]]:
    found: dict[str, tuple[Check, ...]] = {}
    for module in rule_modules():
        for check, kinds in checks_of(module).items():
            for kind in kinds:
                found[kind] = (*found.get(kind, ()), check)
    return found


def checks_of(module: ModuleType) -> dict[Check, list[str]]:
    """Return the checks that a module defines, each with the names of the types that its argument may have."""
    found = {name: value for name, value in vars(module).items() if name.startswith("check_") and callable(value)}
    own = [check for check in found.values() if getattr(check, "__module__", "") == module.__name__]
    return {check: _argument_types(check) for check in own}


def _argument_types(check: Check) -> list[str]:
    """Return the names in ``Clip | run_events.Unscale``, whether the annotation is text or has been evaluated."""
    annotation = next(iter(getattr(check, "__annotations__", {}).values()), "")
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return [name.strip().rpartition(".")[2] for name in text.split("|")]


@functools.cache
def rule_modules() -> tuple[ModuleType, ...]:
    """Return the modules of all rules, sorted by code; plugins are loaded, and warned about, once."""
    return _by_code(_with_plugins(_built_in()))


@functools.cache
def source_rules() -> tuple[ModuleType, ...]:
    """Return the modules of the rules that check source code, without loading the others."""
    own = [_load(*path) for path in _rule_files() if _may_check_source(*path)]
    return _by_code(module for module in _with_plugins(own) if hasattr(module, SOURCE_CHECK))


def rule_groups(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """Group rules under the title of their folder, in the order of codes."""
    titles = {module.RULE.code: _title(module) for module in rule_modules()}
    grouped: dict[str, list[Rule]] = {}
    for rule in sorted(rules, key=lambda rule: rule.code):
        grouped.setdefault(titles.get(rule.code, "Rules of plugins."), []).append(rule)
    return grouped


def _title(module: ModuleType) -> str:
    package = module.__name__.rpartition(".")[0]
    ours = package.startswith(f"{__name__}.")
    return (importlib.import_module(package).__doc__ or "").strip() if ours else "Rules of plugins."


# Finding the files.


@functools.cache
def _built_in() -> tuple[ModuleType, ...]:
    found = [module for module in (_load(*path) for path in _rule_files()) if hasattr(module, "RULE")]
    taken: dict[str, ModuleType] = {}
    for module in found:
        trouble = _clash(module.RULE, taken)
        if trouble:  # a mistake in ampwise: fail loudly
            raise RuntimeError(f"{module.__name__}: {trouble}")
        taken[module.RULE.code] = module
    return _by_code(found)


def _rule_files() -> list[tuple[str, str]]:
    """Return the folder and the stem of every module in the folders of rules."""
    found = [
        (folder, stem)
        for folder in sorted(_names_in(ROOT))
        if folder.startswith("amp")
        for stem in sorted(_names_in(os.path.join(ROOT, folder)))  # noqa: PTH118
        if not stem.startswith("_")
    ]
    if not found:
        raise RuntimeError(f"no rules were found in {ROOT}: the installation of ampwise is damaged")
    return found


def _names_in(folder: str) -> set[str]:
    """Return the names of the modules and packages in a folder; in a zip, or without source files, by ``pkgutil``."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        names = []
    found = {name.removesuffix(".py") for name in names if name.endswith(".py") or name.startswith("amp")}
    if len(found) > 1:
        return found
    import pkgutil

    return {module.name for module in pkgutil.iter_modules([folder])}


def _load(folder: str, stem: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{folder}.{stem}")


def _may_check_source(folder: str, stem: str) -> bool:
    """Return whether a file defines a check of source code; True if its text is not at hand, as in a zip."""
    try:
        with open(os.path.join(ROOT, folder, f"{stem}.py"), "rb") as file:  # noqa: PTH118, PTH123
            return f"\ndef {SOURCE_CHECK}(".encode() in file.read()
    except OSError:
        return True


def _with_plugins(own: Iterable[ModuleType]) -> list[ModuleType]:
    from ampwise.rules import plugins

    if not plugins.entry_points():
        return list(own)
    found = list(own)
    taken = {module.RULE.code: module for module in _built_in()}
    known_types = {kind for ours in _built_in() for kinds in checks_of(ours).values() for kind in kinds}
    for module in plugins.rule_modules(known_types):
        trouble = _clash(module.RULE, taken)
        if trouble:
            plugins.warn(f"{module.__name__}: {trouble}")
        else:
            taken[module.RULE.code] = module
            found.append(module)
    return found


def _clash(rule: Rule, taken: dict[str, ModuleType]) -> str | None:
    """Return why ``rule`` cannot join the rules in ``taken``, or None when it can."""
    for other in taken.values():
        if rule.code == other.RULE.code:
            return f"its code {rule.code} belongs to {other.RULE.name} ({other.__name__})"
        if rule.name == other.RULE.name:
            return f"its name {rule.name} belongs to {other.RULE.code} ({other.__name__})"
    return None


def _by_code(modules: Iterable[ModuleType]) -> tuple[ModuleType, ...]:
    return tuple(sorted(modules, key=lambda module: module.RULE.code))
