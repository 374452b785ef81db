"""The function that makes model and loss function: found, and called. It is the user's code, and never the capsule's.

A capsule may say which function made its model. It is believed only as far as that is a function of a file in the
current folder; any other is for the user to name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.printers.terminal import printable

__all__ = ["Builder", "Built", "build", "builder_named", "checked_name", "failure", "own_builder", "python_path"]

FORM = "module:function or file.py:function, such as train:make"
INSTALLED = {"site-packages", "dist-packages"}


class Builder(NamedTuple):
    """A function that makes model and loss function."""

    said: str  # what an error calls it: "--build train:make"
    place: str  # a module's name, or a file's
    function: str
    file: Path | None = None  # the only one it may be in


class Built(NamedTuple):
    """What it made."""

    models: tuple[Module, ...]
    loss_fn: Callable[..., Any]  # the model itself, where it made no other
    made_by: str  # the function's name


def checked_name(text: str, said: str) -> tuple[str, str]:
    """The two halves of ``module:function``."""
    place, _, function = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    is_file = place.endswith(".py") and place.isprintable()
    if not function.isidentifier() or not (is_module or is_file):
        raise BadInput(f"{said} {text[:200]!r}: expected is {FORM}.")
    return place, function


def builder_named(text: str) -> Builder:
    """The one that the user names."""
    return Builder(f"--build {text}", *checked_name(text, "--build"))


def own_builder(text: str | None) -> Builder:
    """The one that a capsule names, if it is a function of a file in the current folder."""
    if text is None:
        raise BadInput(f"the capsule does not say what makes its model. Give --build: {FORM}.")
    place, function = checked_name(text, "the capsule is to be built with")
    file = _own_file(place)
    if file is None:
        raise BadInput(
            f"the capsule is to be built with {text!r}, which is no file of yours in {Path.cwd()}, so it is not run. "
            f"Go to the folder that has it, or give --build: {FORM}."
        )
    if not _defines(file, function):
        raise BadInput(f"the capsule is to be built with {text!r}, and {file} defines no function of that name.")
    return Builder(str(file.relative_to(Path.cwd().resolve())), place, function, file)


def _own_file(place: str) -> Path | None:
    """Where Python would find it, by names alone: nothing is imported to look for it."""
    here = Path.cwd()
    if place.endswith(".py"):
        found = here / place
        return found.resolve() if _is_own(found) else None
    *packages, last = place.split(".")
    folder = here
    for package in packages:
        folder /= package
        if not _is_own(folder / "__init__.py"):  # without it, Python might prefer another of that name elsewhere
            return None
    candidates = (folder / last / "__init__.py", folder / f"{last}.py")
    return next((found.resolve() for found in candidates if _is_own(found)), None)


def _is_own(path: Path) -> bool:
    """A file in the current folder, wherever links lead, and no part of what is installed."""
    try:
        found, here = path.resolve(strict=True), Path.cwd().resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    is_installed = any(found.is_relative_to(folder) for folder in installed) or INSTALLED & set(found.parts)
    return found.is_file() and found.is_relative_to(here) and not is_installed


def _defines(file: Path, name: str) -> bool:
    """Whether the function is written there: what a file only imports could be any function."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree.body)


# --- calling it ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def python_path(builder: Builder) -> Iterator[None]:
    """The current folder first, as for ``python -m``; for a file its own, as for ``python file.py``."""
    folder = Path(builder.place).resolve().parent if builder.place.endswith(".py") else Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def build(builder: Builder, arguments: Mapping[str, Any]) -> Built:
    """Load and call it."""
    module = _loaded(builder)
    function = getattr(module, builder.function, None)
    if not callable(function):
        raise BadInput(f"{builder.said}: {builder.place} has no function {builder.function!r}.")
    try:
        made = function(**arguments)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{builder.said}: {builder.function}({_shown(arguments)}) failed: {failure(error)}.") from error
    return _checked(made, builder)


def _loaded(builder: Builder) -> ModuleType:
    try:
        module = _from_file(builder) if builder.place.endswith(".py") else importlib.import_module(builder.place)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{builder.said}: {builder.place} cannot be loaded: {failure(error)}.") from error
    found = getattr(module, "__file__", None)
    if builder.file is not None and (found is None or Path(found).resolve() != builder.file):
        raise BadInput(
            f"{builder.said}: {builder.place} is another module, not the file in the current folder, and is not used. "
            f"Give --build {builder.file.name}:{builder.function}."
        )
    return module


def _from_file(builder: Builder) -> ModuleType:
    path = Path(builder.place).resolve()
    name = path.stem if path.stem not in sys.modules else f"ampwise_built_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {builder.place}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(made: Any, builder: Builder) -> Built:
    expected = "expected is `return model, loss_fn`"
    if isinstance(made, Module):
        return Built((made,), made, builder.function)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise BadInput(f"{builder.said}: {builder.function}() returned {_kind(made)}; {expected}.")
    model, loss_fn = made
    models = tuple(model) if isinstance(model, tuple | list) else (model,)
    if not models or not all(isinstance(each, Module) for each in models):
        raise BadInput(f"{builder.said}: the model that {builder.function}() returned is {_kind(model)}; {expected}.")
    if not callable(loss_fn):
        raise BadInput(
            f"{builder.said}: the loss_fn that {builder.function}() returned is {_kind(loss_fn)}; {expected}."
        )
    return Built(models, loss_fn, builder.function)


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(arguments: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{name}={value!r}" for name, value in arguments.items())[:100])


def failure(error: BaseException) -> str:
    """An error of the user's code in a line: what, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not INSTALLED & set(Path(frame.filename).parts)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = printable(" ".join(str(error).split()))  # which may quote what the capsule holds
    return f"{type(error).__name__}{f': {text[:200]}' if text else ''}".rstrip(".") + where
