"""Check and show the arguments that a capsule passes to the function that builds the model.

They come from the capsule even if the user names the function, so they must be plain data, and short enough that the
user can read all of them before the function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable

__all__ = ["checked_arguments", "format_call"]

MAX_CALL_LENGTH = 10_000  # characters of the call as shown
MAX_DEPTH = 20
SUPPORTED = "build_args must be numbers, strings, booleans, None, or lists, tuples and dicts of these"


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
