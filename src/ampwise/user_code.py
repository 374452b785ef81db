"""A function of the user's, named on the command line as ``train:make`` or ``train.py:make``: found, loaded, called."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ampwise.errors import BadInput
from ampwise.printers.terminal import printable

__all__ = [
    "FORM",
    "INSTALLED",
    "Named",
    "call",
    "checked_name",
    "failure",
    "function_of",
    "is_inside",
    "kind",
    "nothing_imported_from",
    "python_path",
]

FORM = "module:function or file.py:function, such as train:make"
INSTALLED = {"site-packages", "dist-packages"}
OURS = Path(__file__).parent


class Named(NamedTuple):
    """A function, by its name."""

    said: str  # what an error calls it: "--build train:make"
    place: str  # a module's name, or a file's
    function: str
    file: Path | None = None  # the only one it may be in


def checked_name(text: str, said: str) -> tuple[str, str]:
    """The two halves of ``module:function``."""
    place, _, function = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    is_file = place.endswith(".py") and place.isprintable()
    if not function.isidentifier() or not (is_module or is_file):
        raise BadInput(f"{f'{said} ' if said else ''}{text[:200]!r}: expected is {FORM}.")
    return place, function


@contextlib.contextmanager
def python_path(named: Named) -> Iterator[None]:
    """The current folder first, as for ``python -m``; for a file its own, as for ``python file.py``."""
    folder = Path(named.place).resolve().parent if named.place.endswith(".py") else Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def nothing_imported_from(folder: Path) -> Iterator[None]:
    """No module is imported from inside the folder, by whatever code and whatever ``sys.path`` has: ImportError."""
    finder = _Refusing(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def is_inside(path: str | Path, folder: Path) -> bool:
    """Whether the path lies in the folder, by its name or where its symlinks lead.

    >>> is_inside("capsules/step-1/make.py", Path("capsules/step-1")), is_inside("make.py", Path("capsules"))
    (True, False)
    """
    return any(Path(real(path)).is_relative_to(real(folder)) for real in (os.path.abspath, os.path.realpath))


class _Refusing:
    """A finder that comes before Python's own, and finds nothing itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        found: ModuleSpec | None = PathFinder.find_spec(name, path, target)
        if found is not None and found.origin is not None and is_inside(found.origin, self._folder):
            folder = Path(os.path.abspath(self._folder)).name  # noqa: PTH100 (as it was named)
            raise ImportError(f"{name} is a file in {folder!r}, from which nothing is imported", name=name)


def function_of(named: Named) -> Callable[..., Any]:
    """The function itself; its module is loaded."""
    module = _loaded(named)
    function = getattr(module, named.function, None)
    if not callable(function):
        raise BadInput(f"{named.said}: {named.place} has no function {named.function!r}.")
    return function  # type: ignore[no-any-return]


def call(said: str, function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Any:
    """What the function returns; what it raises, in a line."""
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{said}: {name}({_shown(arguments)}) failed: {failure(error)}.") from error


def failure(error: BaseException) -> str:
    """An error of the user's code in a line: what, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(Path(frame.filename))]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = printable(" ".join(str(error).split()))  # which may quote what a capsule holds
    return f"{type(error).__name__}{f': {text[:200]}' if text else ''}".rstrip(".") + where


def _is_users(file: Path) -> bool:
    return not INSTALLED & set(file.parts) and not file.is_relative_to(OURS) and not str(file).startswith("<")


def kind(value: Any) -> str:
    """What a value is, for an error.

    >>> kind((1, 2)), kind(None), kind(5)
    ('a tuple of 2', 'None', 'an int')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    named = f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
    return f"{named} of {len(value)}" if isinstance(value, tuple | list) else named


def _loaded(named: Named) -> ModuleType:
    try:
        module = _from_file(named) if named.place.endswith(".py") else importlib.import_module(named.place)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{named.said}: {named.place} cannot be loaded: {failure(error)}.") from error
    found = getattr(module, "__file__", None)
    if named.file is not None and (found is None or Path(found).resolve() != named.file):
        raise BadInput(
            f"{named.said}: {named.place} is another module, not the file in the current folder, and is not used. "
            f"Give --build {named.file.name}:{named.function}."
        )
    return module


def _from_file(named: Named) -> ModuleType:
    path = Path(named.place).resolve()
    name = path.stem if path.stem not in sys.modules else f"ampwise_built_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {named.place}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _shown(arguments: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{name}={value!r}" for name, value in arguments.items())[:100])
