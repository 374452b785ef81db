"""Find, load and call a user's function that the command line names as ``train:make`` or ``train.py:make``."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ampwise.errors import BadInput, nearest
from ampwise.finding.terminal import printable

__all__ = [
    "FUNCTION_FORMAT",
    "INSTALLED",
    "UserFunction",
    "call_user_function",
    "check_function",
    "describe_error",
    "describe_type",
    "imports_refused_from",
    "is_inside",
    "load_function",
    "python_path_of",
    "split_function_name",
]

FUNCTION_FORMAT = "train.py:make or train:make, a function of yours; `ampwise init train.py` writes one"
WRITTEN_BY_INIT = "ampwise_make.py"
INSTALLED = {"site-packages", "dist-packages"}
OURS = Path(__file__).parents[1]


class UserFunction(NamedTuple):
    """A function of the user, by module or file and name."""

    said: str  # how errors name it: "train:make"
    place: str  # name of a module or of a file
    function: str
    file: Path | None = None  # the only file it may come from


def split_function_name(text: str, said: str) -> tuple[str, str]:
    """Split ``module:function`` into its two parts; BadInput if it has another form."""
    place, _, function = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    is_file = place.endswith(".py") and place.isprintable()
    if not function.isidentifier() or not (is_module or is_file):
        raise BadInput(f"{f'{said} ' if said else ''}{text[:200]!r}: expected {FUNCTION_FORMAT}.")
    return place, function


def check_function(text: str) -> None:
    """Raise BadInput if the file or module that ``train.py:make`` names has no such function.

    Its source is read, not run: whether a name exists should not take the seconds that importing torch takes.
    """
    place, function = split_function_name(text, "")
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            near = nearest(file.stem, [each.stem for each in file.parent.glob("*.py")])
            guess = f" Did you mean {file.with_name(near[0] + '.py')}?" if near else ""
            raise BadInput(f"{text}: there is no file {place}.{guess}")
    else:
        top, *inner = place.split(".")
        found = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
        if found is None and top not in sys.builtin_module_names:
            near = nearest(top, [each.stem for each in Path.cwd().glob("*.py")])
            guess = f"Did you mean {near[0]}.py:{function}? " if near else ""
            raise BadInput(f"{text}: there is no module {place!r}. {guess}Expected {FUNCTION_FORMAT}.")
        if found is None or inner or found.origin is None or not found.origin.endswith(".py"):
            return  # inside a package: importing it will tell
        file = Path(found.origin)
    try:
        with warnings.catch_warnings(action="ignore"):  # importing it will warn
            tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {printable(str(error))}"
        raise BadInput(f"{text}: {place} cannot be loaded: {reason}.") from error
    except OSError:
        return  # importing it tells why
    bound: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else used).add(node.id)
        elif isinstance(node, ast.alias):
            bound |= {node.asname or node.name.partition(".")[0]}
    may_be_added = used & {"exec", "globals", "setattr", "vars"} or bound & {"*", "__getattr__"}
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    if function not in bound and not may_be_added:
        near = nearest(function, own)
        guess = f"Did you mean {place}:{near[0]}? " if near else ""
        if (file.parent / WRITTEN_BY_INIT).is_file():
            guess = f"Did you mean {WRITTEN_BY_INIT}:make? "
        where, script = (place, "train.py") if file.name == "__init__.py" else (file.name, file.name)
        raise BadInput(f"{text}: {where} has no function {function!r}. {guess}`ampwise init {script}` writes one.")


@contextlib.contextmanager
def python_path_of(named: UserFunction) -> Iterator[None]:
    """Put the current folder first in sys.path, as ``python -m`` does; for a file its folder, as ``python file.py``."""
    folder = Path(named.place).resolve().parent if named.place.endswith(".py") else Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def imports_refused_from(folder: Path) -> Iterator[None]:
    """Raise ImportError for any import from inside the folder, whatever ``sys.path`` contains."""
    finder = _RefuseImports(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def is_inside(path: str | Path, folder: Path) -> bool:
    """Return whether the path lies in the folder, by its name or after resolving symlinks.

    >>> is_inside("capsules/step-1/make.py", Path("capsules/step-1")), is_inside("make.py", Path("capsules"))
    (True, False)
    """
    return any(Path(real(path)).is_relative_to(real(folder)) for real in (os.path.abspath, os.path.realpath))


class _RefuseImports:
    """Import finder that refuses modules in a folder, and leaves all others to Python's finders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        found: ModuleSpec | None = PathFinder.find_spec(name, path, target)
        if found is not None and found.origin is not None and is_inside(found.origin, self._folder):
            folder = Path(os.path.abspath(self._folder)).name  # noqa: PTH100 (as it was named)
            raise ImportError(f"{name} is a file in {folder!r}, and nothing is imported from there", name=name)


def load_function(named: UserFunction) -> Callable[..., Any]:
    """Load the module and return the function."""
    try:
        module = _from_file(named) if named.place.endswith(".py") else importlib.import_module(named.place)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{named.said}: {named.place} cannot be loaded: {describe_error(error)}.") from error
    found = getattr(module, "__file__", None)
    if named.file is not None and (found is None or Path(found).resolve() != named.file):
        raise BadInput(
            f"{named.said}: {named.place} is another module, not the file in the current folder, so it is not used. "
            f"Name the file: {named.file.name}:{named.function}."
        )
    function = getattr(module, named.function, None)
    if not callable(function):
        raise BadInput(f"{named.said}: {named.place} has no function {named.function!r}.")
    return function  # type: ignore[no-any-return]


def call_user_function(said: str, function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function and return its result; BadInput, in one line, for whatever it raises."""
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        shown = printable(", ".join(f"{key}={value!r}" for key, value in arguments.items())[:100])
        raise BadInput(f"{said}: {name}({shown}) failed: {describe_error(error)}.") from error


def describe_error(error: BaseException) -> str:
    """Describe an error of the user's code in one line: what, and where."""
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not (INSTALLED & set(file.parts) or file.is_relative_to(OURS) or frame.filename.startswith("<")):
            where = f" ({file.name}:{frame.lineno})"
            break
    text = printable(" ".join(str(error).split()))  # may quote data of an untrusted capsule
    return f"{type(error).__name__}{f': {text[:200]}' if text else ''}".rstrip(".") + where


def describe_type(value: Any) -> str:
    """Describe the type of a value, for an error.

    >>> describe_type((1, 2)), describe_type(None), describe_type(5)
    ('a tuple of 2', 'None', 'an int')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    named = f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
    return f"{named} of {len(value)}" if isinstance(value, tuple | list) else named


def _from_file(named: UserFunction) -> ModuleType:
    path = Path(named.place).resolve()
    name = path.stem if path.stem not in sys.modules else f"ampwise_built_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {named.place}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
