"""Find and call the function that builds the model and the loss function: the user's code, never the capsule's.

The user names it, or confirms the capsule's suggestion: a function in a file in the current folder, outside the
capsule's own folder. Nothing is called only because a capsule names it. The arguments come from the capsule even then,
so they must be plain data, and short enough that the user can read all of them before the function is called.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.trace.user_code import (
    FUNCTION_FORMAT,
    INSTALLED,
    UserFunction,
    call_user_function,
    describe_type,
    is_inside,
    load_function,
    split_function_name,
)

__all__ = ["BuiltModel", "build", "builder_named", "checked_arguments", "format_call", "suggested_builder"]

MAX_CALL_LENGTH = 10_000  # characters of the call as shown
MAX_DEPTH = 20
SUPPORTED = "build_args must be numbers, strings, booleans, None, or lists, tuples and dicts of these"


class BuiltModel(NamedTuple):
    """The models and the loss function that the user's function built."""

    models: tuple[Module, ...]
    loss_fn: Callable[..., Any]  # the model itself if the function returned no loss function
    made_by: str  # the function's name


def builder_named(text: str, capsule: Path) -> UserFunction:
    """Return the function that the user names; BadInput for a file inside the capsule's folder."""
    place, function = split_function_name(text, "")
    _refuse_inside(place, capsule, text)
    return UserFunction(text, place, function)


def suggested_builder(text: str | None, capsule: Path) -> UserFunction:
    """Return the function that the capsule names, if it is in a file in the current folder; else BadInput."""
    if text is None:
        raise BadInput(f"the capsule does not say which function makes its model. Add MAKE: {FUNCTION_FORMAT}.")
    place, function = split_function_name(text, "the capsule names the function")
    file = _own_file(place)
    if file is None:
        raise BadInput(
            f"the capsule names the function {text!r}, which is not in a file of yours in {Path.cwd()}, so it is not "
            f"run. Change to the folder that has the file, or add MAKE: {FUNCTION_FORMAT}."
        )
    _refuse_inside(file, capsule, f"the capsule names the function {text!r}")
    if not _defines(file, function):
        raise BadInput(f"the capsule names the function {text!r}, and {file} does not define it.")
    return UserFunction(str(file.relative_to(Path.cwd().resolve())), place, function, file)


def _refuse_inside(file: str | Path, capsule: Path, said: str) -> None:
    if str(file).endswith(".py") and is_inside(file, capsule):
        raise BadInput(
            f"{said}: the file is inside the capsule's folder, and no code from there is run. Name a file of your own."
        )


def _own_file(place: str) -> Path | None:
    """Return the file that Python would import, found by name: nothing is imported to look for it."""
    here = Path.cwd()
    if place.endswith(".py"):
        found = here / place
        return found.resolve() if _is_own(found) else None
    *packages, last = place.split(".")
    folder = here
    for package in packages:
        folder /= package
        if not _is_own(folder / "__init__.py"):  # without it, Python may prefer a package of that name elsewhere
            return None
    candidates = (folder / last / "__init__.py", folder / f"{last}.py")
    return next((found.resolve() for found in candidates if _is_own(found)), None)


def _is_own(path: Path) -> bool:
    """Return whether a path, with links resolved, is a file in the current folder and not an installed one."""
    try:
        found, here = path.resolve(strict=True), Path.cwd().resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    is_installed = any(found.is_relative_to(folder) for folder in installed) or INSTALLED & set(found.parts)
    return found.is_file() and found.is_relative_to(here) and not is_installed


def _defines(file: Path, name: str) -> bool:
    """Return whether the file itself defines the function: an imported one could be any function."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree.body)


def checked_arguments(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments unchanged. BadInput for tensors, objects, invalid argument names, and too long a call."""
    for name, value in arguments.items():
        if not name.isidentifier():
            raise BadInput(f"build_args has {name[:80]!r}, which is not a valid argument name.")
        _refuse_objects(value, f"build_args[{name!r}]", 0)
    length = len(format_call("", arguments))
    if length > MAX_CALL_LENGTH:
        raise BadInput(f"build_args take {length:,} characters; the limit is {MAX_CALL_LENGTH:,}.")
    return arguments


def format_call(function: str, arguments: Mapping[str, Any]) -> str:
    """Return a call with all of its arguments, as text to show.

    >>> format_call("make", {"width": 64, "name": "a"})
    "make(width=64, name='a')"
    """
    return printable(f"{function}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")


def _refuse_objects(value: Any, where: str, depth: int) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        return
    if type(value) not in (list, tuple, dict) or depth == MAX_DEPTH:
        what = f"nested more than {MAX_DEPTH} deep" if depth == MAX_DEPTH else f"a {type(value).__name__}"
        raise BadInput(f"{where[:200]} is {what}. {SUPPORTED}.")
    for key, inner in value.items() if type(value) is dict else enumerate(value):
        if type(value) is dict and not isinstance(key, str):
            raise BadInput(f"{where[:200]} has the key {str(key)[:40]!r}, which is not a string. {SUPPORTED}.")
        _refuse_objects(inner, f"{where}[{key!r}]", depth + 1)


def build(builder: UserFunction, arguments: Mapping[str, Any], inputs: int | None = None) -> BuiltModel:
    """Load the user's function and call it.

    It may also return a batch, as for the other commands. inputs: how many arguments the capsule has; if the batch has
    another number, they are not those of the loss function, but of the model, as `ampwise run` saves them.
    """
    made = call_user_function(builder.said, load_function(builder), builder.function, arguments)
    expected = "expected `return model, batch, loss_fn`, `return model, loss_fn` or `return model`"
    if isinstance(made, tuple | list) and (len(made) in (3, 4) or (len(made) == 2 and not callable(made[1]))):
        model, batch, loss_fn = (*made, None)[:3]
        size = len(batch) if isinstance(batch, tuple | list | Mapping) else 1
        made = model if loss_fn is None or inputs not in (None, size) else (model, loss_fn)
    if isinstance(made, Module):
        return BuiltModel((made,), made, builder.function)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise BadInput(f"{builder.said}: {builder.function}() returned {describe_type(made)}; {expected}.")
    model, loss_fn = made
    models = tuple(model) if isinstance(model, tuple | list) else (model,)
    if not models or not all(isinstance(each, Module) for each in models):
        raise BadInput(
            f"{builder.said}: the model that {builder.function}() returned is {describe_type(model)}; {expected}."
        )
    if not callable(loss_fn):
        raise BadInput(
            f"{builder.said}: the loss_fn that {builder.function}() returned is {describe_type(loss_fn)}; {expected}."
        )
    return BuiltModel(models, loss_fn, builder.function)
