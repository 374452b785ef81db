"""The arguments that a capsule gives to the function that makes the model: plain data, few enough to be read.

They are the capsule's choice, whoever names the function, so all of them are shown before it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampwise.errors import BadInput
from ampwise.printers.terminal import printable

__all__ = ["checked_arguments", "shown_call"]

LONGEST = 10_000  # characters of a call as it is shown
DEEPEST = 20
TAKES = "build_args are numbers, text, truth values, None, and lists, tuples and dicts of them"


def checked_arguments(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same. BadInput for tensors and objects, what is no name of an argument, and more than one can read."""
    for name, value in arguments.items():
        if not name.isidentifier():
            raise BadInput(f"build_args has {name[:80]!r}, which is no name of an argument.")
        _refuse_objects(value, f"build_args[{name!r}]", 0)
    length = len(shown_call("", arguments))
    if length > LONGEST:
        raise BadInput(f"build_args take {length:,} characters to write, and {LONGEST:,} is the most.")
    return arguments


def shown_call(function: str, arguments: Mapping[str, Any]) -> str:
    """A call for people, with all of its arguments.

    >>> shown_call("make", {"width": 64, "name": "a"})
    "make(width=64, name='a')"
    """
    return printable(f"{function}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")


def _refuse_objects(value: Any, where: str, depth: int) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        return
    if type(value) not in (list, tuple, dict) or depth == DEEPEST:
        what = f"nested more than {DEEPEST} deep" if depth == DEEPEST else f"a {type(value).__name__}"
        raise BadInput(f"{where[:200]} is {what}. {TAKES}.")
    for key, inner in value.items() if type(value) is dict else enumerate(value):
        if type(value) is dict and not isinstance(key, str):
            raise BadInput(f"{where[:200]} has the key {str(key)[:40]!r}, which is no text. {TAKES}.")
        _refuse_objects(inner, f"{where}[{key!r}]", depth + 1)
