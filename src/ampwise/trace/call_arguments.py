"""Find the tensors and iterators that a function receives, by name: "x", "batch['pixels']"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import IOBase
from types import FunctionType
from typing import Any

from torch import Tensor

__all__ = ["iterator_names", "named_tensors", "outer_variables"]

MAX_DEPTH = 5
MAX_TENSORS = 1000


def named_tensors(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in a call's arguments, also nested ones, by path."""
    found: dict[str, Tensor] = {}
    for name, value in _bound(function, args, kwargs):
        for path, tensor in _tensors(value, name, MAX_DEPTH):
            if len(found) < MAX_TENSORS:
                found.setdefault(path, tensor)
    return found


def iterator_names(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of the iterators that a second call of the function would advance."""
    known = dict(_bound(function, args, kwargs))
    inner = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(inner):
        own = getattr(getattr(function, "__self__", None), "__dict__", {})
        mine = {f"self.{name}": own[name] for name in inner.__code__.co_names if name in own}
        known |= {**outer_variables(inner), **mine}
    return [name for name, each in known.items() if isinstance(each, Iterator) and not isinstance(each, IOBase)]


def outer_variables(function: FunctionType) -> dict[str, Any]:
    """Return the global and enclosing variables that a function uses and that have a value now.

    inspect.getclosurevars raises for those without a value.
    """
    known = function.__globals__
    found = {name: known[name] for name in function.__code__.co_names if name in known}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a C function, or arguments that the call will reject
        yield from ((f"argument {number}", value) for number, value in enumerate(args, 1))
        yield from kwargs.items()
        return
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth:
        for step, inner in _parts(value):
            yield from _tensors(inner, path + step, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the text that selects it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value):
        yield from ((f".{name}", inner) for name, inner in vars(value).items())
