"""The function that makes model and loss function. It is the user's code, and never the capsule's.

The user names it, or confirms what the capsule suggests: a function of a file in the current folder, outside of the
capsule's own. Nothing is called only because a capsule names it.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.user_code import FORM, INSTALLED, Named, call, checked_name, function_of, is_inside, kind

__all__ = ["Built", "build", "builder_named", "suggested_builder"]


class Built(NamedTuple):
    """What it made."""

    models: tuple[Module, ...]
    loss_fn: Callable[..., Any]  # the model itself, where it made no other
    made_by: str  # the function's name


def builder_named(text: str, capsule: Path) -> Named:
    """The one that the user names; BadInput for a file that came with the capsule."""
    place, function = checked_name(text, "--build")
    _refuse_inside(place, capsule, f"--build {text}")
    return Named(f"--build {text}", place, function)


def suggested_builder(text: str | None, capsule: Path) -> Named:
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
    _refuse_inside(file, capsule, f"the capsule is to be built with {text!r}")
    if not _defines(file, function):
        raise BadInput(f"the capsule is to be built with {text!r}, and {file} defines no function of that name.")
    return Named(str(file.relative_to(Path.cwd().resolve())), place, function, file)


def _refuse_inside(file: str | Path, capsule: Path, said: str) -> None:
    if str(file).endswith(".py") and is_inside(file, capsule):
        raise BadInput(
            f"{said}: the file is inside the capsule's own folder, from which nothing is run. Give --build with a file "
            "of your own."
        )


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


def build(builder: Named, arguments: Mapping[str, Any]) -> Built:
    """Load and call it."""
    return _checked(call(builder.said, function_of(builder), builder.function, arguments), builder)


def _checked(made: Any, builder: Named) -> Built:
    expected = "expected is `return model, loss_fn`"
    if isinstance(made, Module):
        return Built((made,), made, builder.function)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise BadInput(f"{builder.said}: {builder.function}() returned {kind(made)}; {expected}.")
    model, loss_fn = made
    models = tuple(model) if isinstance(model, tuple | list) else (model,)
    if not models or not all(isinstance(each, Module) for each in models):
        raise BadInput(f"{builder.said}: the model that {builder.function}() returned is {kind(model)}; {expected}.")
    if not callable(loss_fn):
        raise BadInput(
            f"{builder.said}: the loss_fn that {builder.function}() returned is {kind(loss_fn)}; {expected}."
        )
    return Built(models, loss_fn, builder.function)
