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


def entry_points(category: str | None = None) -> list[EntryPoint]:
    """Return the plugins' entry points, for one category or all, in a deterministic order."""
    return [entry for entry in _all_entry_points() if category in (None, entry.name)]


def modules(entry_point: EntryPoint) -> Iterator[ModuleType]:
    """Yield the valid rule modules of an entry point."""
    top = _load(entry_point.module)
    for module in _with_submodules(top) if top else ():
        if not hasattr(module, "RULE"):
            continue
        trouble = _trouble(module)
        if trouble:
            warn(f"{module.__name__}: {trouble}")
        else:
            yield module


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


@functools.cache
def _all_entry_points() -> tuple[EntryPoint, ...]:
    # importlib.metadata takes longer to import than all of ampwise's own modules, and is seldom needed.
    if not mentioned(sys.path):
        return ()
    from importlib import metadata

    found = metadata.entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


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

    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        below = _load(f"{module.__name__}.{found.name}")
        if below:
            yield from _with_submodules(below)


def _trouble(module: ModuleType) -> str | None:
    rule = module.RULE
    if not isinstance(rule, Rule):
        return "its RULE is not an ampwise.finding.Rule"
    if not callable(getattr(module, "check", None)):
        return "it has a RULE but no check function"
    if rule.code.rstrip("0123456789") == OWN_LETTERS:
        return f"its code {rule.code} starts with AMP, which is reserved for ampwise's own rules"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["(no message)"])[0]
