"""Sphinx extension: convert plain-text docstrings, with lines like ``name: description``, to reST.

Names of parameters become fields. A callable package is shown as the function of the same name: ``ampwise.trace``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sphinx.application import Sphinx

__all__ = ["with_fields"]

PARAMETERS = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.+)")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _docstring(_app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    function = _function(thing)
    if function is not thing:
        lines[:] = (inspect.getdoc(function) or "").splitlines()
    lines[:] = with_fields(lines, _parameters(function))


def _signature(
    _app: Sphinx, what: str, _name: str, thing: Any, _options: Any, _args: str | None, _returns: str | None
) -> tuple[str, str | None] | None:
    function = _function(thing)
    if what == "module" or function is thing:
        return None
    whole = str(inspect.signature(function)).replace("'", "")
    args, _, returns = whole.partition(" -> ")
    return args, returns or None


def _function(thing: Any) -> Any:
    """Return the function of a callable package, else the thing itself."""
    if inspect.ismodule(thing) and callable(thing):
        return getattr(thing, thing.__name__.rpartition(".")[2])
    return thing


def _parameters(thing: Any) -> set[str]:
    try:
        return {*inspect.signature(thing).parameters}
    except (TypeError, ValueError):
        return set()


def with_fields(lines: Iterable[str], parameters: set[str]) -> Iterator[str]:
    """Yield the lines, with each line that starts with parameter names, and its indented lines, as a field."""
    in_field = False
    for line in lines:
        found = PARAMETERS.fullmatch(line)
        if found and {*found["names"].split(", ")} <= parameters:
            if not in_field:
                yield ""
            in_field = True
            yield f":param {found['names'].replace(', ', '/')}: {found['text']}"  # a field's name is one word
        elif in_field and line and not line.startswith(" "):
            in_field = False
            yield from ("", line)
        else:
            in_field = in_field and bool(line)
            yield line
