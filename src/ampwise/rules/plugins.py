"""Rules from other packages. A faulty plugin is reported in one line and never stops ampwise."""
# ruff: noqa: PTH118, PTH123, PTH208 (every start looks for plugins, and pathlib alone would take longer than that)

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator

from ampwise.finding import Rule

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from types import ModuleType

GROUP = "ampwise.rules"
OWN_LETTERS = "AMP"


def rule_modules(known_types: set[str]) -> Iterator[ModuleType]:
    """Yield the valid rule modules of all plugins; ``known_types`` are the names of the types that can be checked."""
    seen: set[str] = set()
    for entry_point in entry_points():
        top = _load(entry_point.value.partition(":")[0].strip())
        for module in _with_submodules(top) if top else ():
            if module.__name__ in seen:
                continue
            seen.add(module.__name__)
            try:
                trouble = _trouble(module, known_types) if hasattr(module, "RULE") else None
                is_rule = hasattr(module, "RULE") and trouble is None
            except Exception as error:  # third-party code: anything may be raised
                trouble, is_rule = f"looking at it failed with {type(error).__name__}: {_first_line(error)}", False
            if trouble:
                warn(f"{module.__name__}: {trouble}")
            elif is_rule:
                yield module


@functools.cache
def entry_points() -> tuple[EntryPoint, ...]:
    """Return the plugins' entry points in a deterministic order."""
    # importlib.metadata takes longer to import than all of ampwise's own modules, and is seldom needed.
    if not mentioned(sys.path):
        return ()
    from importlib import metadata

    found = metadata.entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


def warn(message: str) -> None:
    """Print a warning line on stderr. ``warnings`` is not used: under ``-W error`` a plugin would stop the run."""
    from ampwise.finding.terminal import say

    say("ampwise: warning: ignored plugin {}", message)


def mentioned(folders: list[str]) -> bool:
    """Return whether a package installed in ``folders`` declares entry points for ampwise rules."""
    return any(_holds(path, GROUP.encode()) for folder in folders for path in _entry_point_files(folder))


def _entry_point_files(folder: str) -> Iterator[str]:
    try:
        names = os.listdir(folder or ".")  # "" on sys.path is the current folder
    except OSError:  # a zip, or gone
        return
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            yield os.path.join(folder, name, "entry_points.txt")


def _holds(path: str, text: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return text in file.read()
    except OSError:  # most have no such file
        return False


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # third-party code: anything may be raised
        warn(f"{name}: importing it failed with {type(error).__name__}: {_first_line(error)}")
        return None


def _with_submodules(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    import pkgutil

    for found in pkgutil.iter_modules(vars(module).get("__path__", [])):
        if found.name == "__main__":
            continue
        below = _load(f"{module.__name__}.{found.name}")
        if below:
            yield from _with_submodules(below)


def _trouble(module: ModuleType, known_types: set[str]) -> str | None:
    from ampwise.rules import checks_of

    rule = module.RULE
    if not isinstance(rule, Rule):
        return "its RULE is not an ampwise.finding.Rule"
    if rule.code.rstrip("0123456789") == OWN_LETTERS:
        return f"its code {rule.code} starts with AMP, which is reserved for ampwise's own rules"
    checks = checks_of(module)
    if not checks:
        return "it has a RULE but no function whose name begins with check_"
    for check, kinds in checks.items():
        if (check.__name__ == "check_source") != (kinds == ["SourceFile"]):
            return f"{check.__name__} must be named check_source if, and only if, its argument is a SourceFile"
        unknown = next((kind for kind in kinds if kind not in known_types), None)
        if unknown is not None:
            return (
                f"{check.__name__} must annotate its argument with the type that it examines, such as SourceFile; "
                f"{unknown or 'no annotation'!r} is not one of {', '.join(sorted(known_types))}"
            )
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["(no message)"])[0]
