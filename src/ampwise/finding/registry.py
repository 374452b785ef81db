"""The rules of ampwise and of plugins: find their files, and run their checks.

A rule file has ``RULE = Rule(...)`` and one or more functions whose names begin with ``check_``. The annotation of a
check's argument says what it examines: ``check_source(code: SourceFile)`` a script, ``check_event(clip: Clip)`` a call
in a running one, ``check_op(failure: Failure)`` the origin of a NaN. ``run_checks(record)`` calls every check of that
type. There is no list to maintain: ampwise's own rules are found by scanning the folders of ``ampwise.rules``, which
are imported by name, so that every package can run the checks of what it produces.

Other packages add rules through the entry-point group ``ampwise.rules``; the value is a module, or a package of
modules, and the name is free::

    [project.entry-points."ampwise.rules"]
    acme = "acme.amp_rules"

A faulty plugin is reported in one line and never stops ampwise.
"""
# ruff: noqa: PTH118, PTH123, PTH208 (every start looks for rules, and pathlib takes longer to load than all of them)

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from ampwise.errors import UnknownName
from ampwise.finding import Finding, Findings, Rule
from ampwise.finding.package_modules import module_names

Check = Callable[[Any], Findings]
GROUP = "ampwise.rules"  # the package of our rules, and the entry-point group of plugins
SOURCE_CHECK = "check_source"
# Rules that became log events, of the guard and of sinks: their codes get no second meaning.
RETIRED_CODES = {
    "AMP801": "sink-failed",
    "AMP802": "step-skipped",
    "AMP803": "scale-at-floor",
    "AMP804": "rolled-back",
    "AMP805": "precision-changed",
    "AMP806": "climbed-back",
    "AMP809": "checkpoint-late",
    "AMP812": "out-of-memory",
    "AMP813": "preempted",
    "AMP815": "ranks-changed",
    "AMP816": "lock-taken-over",
}
# The names that a check may have, each with what runs it. A rule with several of a kind calls them check_event_scaler.
RUN_BY: dict[str, tuple[str, ...]] = {
    SOURCE_CHECK: ("ampwise check",),
    "check_event": ("ampwise run",),  # one call of a running script
    "check_run": ("ampwise run",),  # all of a running script's calls
    "check_gradients": ("ampwise run",),
    "check_learning": ("ampwise run",),
    "check_time": ("ampwise run",),
    "check_op": ("ampwise replay", "ampwise run", "ampwise.trace", "ampwise.Engine"),
    "check_float8": ("ampwise.Engine",),
    "check_guard": ("ampwise.Guard",),
    "check_hardware": ("ampwise gpu",),
    "check_matmuls": ("ampwise align",),
    "check_speed": ("ampwise bench",),
    "check_difference": ("ampwise diff",),
    "check_choice": ("ampwise advise",),
}
LONGEST_ERROR = 300  # characters


# Rules


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
    for code, event in RETIRED_CODES.items():
        if wanted in (code.lower(), event):
            kind = "sinks" if event == "sink-failed" else "the guard"
            raise UnknownName("rule", name, (), listing=f"{code} became a log event of {kind}, `{event}`.")
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
    kinds = [kind for kind in RUN_BY if any(name == kind or name.startswith(f"{kind}_") for name in names)]
    return list(dict.fromkeys(by for kind in kinds for by in RUN_BY[kind]))


def rule_groups(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """Group rules under the title of their folder, the docstring of the package, in the order of codes."""
    packages = {module.RULE.code: module.__name__.rpartition(".")[0] for module in _built_in()}
    grouped: dict[str, list[Rule]] = {}
    for rule in sorted(rules, key=lambda rule: rule.code):
        package = packages.get(rule.code)
        title = (importlib.import_module(package).__doc__ or "").strip() if package else "Rules of plugins."
        grouped.setdefault(title, []).append(rule)
    return grouped


# Checks


def run_checks(record: Any, *, keep_going: bool = False) -> list[Finding]:
    """Return the findings of every rule that examines records of this type.

    keep_going: a check that fails, such as one of a plugin, is reported on stderr and left out.
    """
    found: list[Finding] = []
    for check in checks_for(type(record)):
        try:
            found += check(record)
        except Exception as error:
            if not keep_going:
                raise
            from ampwise.finding.log import log

            code = sys.modules[check.__module__].RULE.code
            text = repr(error)[:LONGEST_ERROR]
            log("warning", "{} failed to check a {}: {}", code, type(record).__name__, text)
    return found


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
    found: dict[Check, list[str]] = {}
    for name, check in vars(module).items():
        if name.startswith("check_") and callable(check) and getattr(check, "__module__", "") == module.__name__:
            annotation = next(iter(getattr(check, "__annotations__", {}).values()), "")
            # The names in `Clip | run_events.Unscale`, whether the annotation is text or has been evaluated.
            text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            found[check] = [kind.strip().rpartition(".")[2] for kind in text.split("|")]
    return found


# Files


@functools.cache
def rule_modules() -> tuple[ModuleType, ...]:
    """Return the modules of all rules, sorted by code."""
    return _by_code([*_built_in(), *_plugins()])


@functools.cache
def source_rules() -> tuple[ModuleType, ...]:
    """Return the modules of the rules that check source code, sorted by code, without loading the others."""
    own = []
    for name, path in _rule_files():
        try:
            with open(path, "rb") as file:
                if f"\ndef {SOURCE_CHECK}(".encode() not in file.read():
                    continue
        except OSError:  # its text is not at hand, as in a zip
            pass
        own.append(importlib.import_module(name))
    return _by_code([module for module in (*own, *_plugins()) if hasattr(module, SOURCE_CHECK)])


@functools.cache
def _built_in() -> tuple[ModuleType, ...]:
    taken: dict[str, ModuleType] = {}
    for name, _ in _rule_files():
        module = importlib.import_module(name)
        if hasattr(module, "RULE"):  # the others are what rules share
            if clash := _clash(module.RULE, taken):  # a mistake in ampwise: fail loudly
                raise RuntimeError(f"{name}: {clash}")
            taken[module.RULE.code] = module
    return _by_code(taken.values())


def _rule_files() -> list[tuple[str, str]]:
    """Return the name and the path of every module in the folders of rules."""
    (root,) = importlib.import_module(GROUP).__path__
    folders = [name for name in module_names([root]) if name.startswith("amp")]
    found = [
        (f"{GROUP}.{folder}.{stem}", os.path.join(root, folder, f"{stem}.py"))
        for folder in folders
        for stem in module_names([os.path.join(root, folder)])
    ]
    if not found:
        raise RuntimeError(f"no rules were found in {root}: the installation of ampwise is damaged")
    return found


def _by_code(modules: Iterable[ModuleType]) -> tuple[ModuleType, ...]:
    return tuple(sorted(modules, key=lambda module: module.RULE.code))


def _clash(rule: Rule, taken: dict[str, ModuleType]) -> str | None:
    """Return why ``rule`` cannot join the rules in ``taken``, or None when it can."""
    for other in taken.values():
        if rule.code == other.RULE.code:
            return f"its code {rule.code} belongs to {other.RULE.name} ({other.__name__})"
        if rule.name == other.RULE.name:
            return f"its name {rule.name} belongs to {other.RULE.code} ({other.__name__})"
    return None


# Plugins


@functools.cache
def _plugins() -> tuple[ModuleType, ...]:
    """Return the valid rule modules of plugins; warn about the others, once."""
    # importlib.metadata takes longer to import than all of ampwise's own modules, and is seldom needed.
    if not mentioned(sys.path):
        return ()
    from importlib import metadata

    modules: dict[str, ModuleType] = {}  # by name, since two entry points may have the same module
    for entry_point in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        for module in _with_submodules(entry_point.value.partition(":")[0].strip()):
            modules[module.__name__] = module
    if not modules:
        return ()
    taken = {module.RULE.code: module for module in _built_in()}
    known_types = {kind for module in _built_in() for kinds in checks_of(module).values() for kind in kinds}
    found = []
    for name, module in modules.items():
        try:
            if not hasattr(module, "RULE"):
                continue
            trouble = _trouble(module, known_types) or _clash(module.RULE, taken)
        except Exception as error:  # third-party code: anything may be raised
            trouble = f"looking at it failed with {_error_text(error)}"
        if trouble:
            _warn(f"{name}: {trouble}")
        else:
            taken[module.RULE.code] = module
            found.append(module)
    return tuple(found)


def mentioned(folders: list[str]) -> bool:
    """Return whether a package installed in ``folders`` declares entry points for ampwise rules."""
    for folder in folders:
        try:
            names = os.listdir(folder or ".")  # "" on sys.path is the current folder
        except OSError:  # a zip, or gone
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                        if GROUP.encode() in file.read():
                            return True
                except OSError:  # most have no such file
                    continue
    return False


def _with_submodules(name: str) -> Iterator[ModuleType]:
    """Yield a module and those below it; warn about those that cannot be imported."""
    import pkgutil

    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # third-party code: anything may be raised
        _warn(f"{name}: importing it failed with {_error_text(error)}")
        return
    yield module
    for below in pkgutil.iter_modules(vars(module).get("__path__", [])):
        if below.name != "__main__":
            yield from _with_submodules(f"{name}.{below.name}")


def _trouble(module: ModuleType, known_types: set[str]) -> str | None:
    """Return what is wrong with a plugin's rule module, or None."""
    rule = module.RULE
    if not isinstance(rule, Rule):
        return "its RULE is not an ampwise.finding.Rule"
    if rule.code.rstrip("0123456789") == "AMP":
        return f"its code {rule.code} starts with AMP, which is reserved for ampwise's own rules"
    checks = checks_of(module)
    if not checks:
        return "it has a RULE but no function whose name begins with check_"
    for check, kinds in checks.items():
        if (check.__name__ == SOURCE_CHECK) != (kinds == ["SourceFile"]):
            return f"{check.__name__} must be named check_source if, and only if, its argument is a SourceFile"
        unknown = next((kind for kind in kinds if kind not in known_types), None)
        if unknown is not None:
            return (
                f"{check.__name__} must annotate its argument with the type that it examines, such as SourceFile; "
                f"{unknown or 'no annotation'!r} is not one of {', '.join(sorted(known_types))}"
            )
    return None


def _warn(message: str) -> None:
    """Log a warning. ``warnings`` is not used: under ``-W error`` a plugin would stop the run."""
    from ampwise.finding.log import log

    log("warning", "ignored plugin {}", message)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['(no message)'])[0]}"
