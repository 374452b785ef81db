"""Functions of a script that iterate twice over what may be a generator, as ``model.parameters()`` is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import says
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, call_name, nodes_of

__all__ = ["spent_generators"]

GENERATORS = ("parameters", "named_parameters")


class _Function(NamedTuple):
    name: str
    position: int
    argument: str
    second_loop: int  # its line


def spent_generators(files: Iterable[str]) -> Iterator[tuple[CallSite, CallSite]]:
    """Yield the second loop over a parameter of a function, if it changes gradients, and the call with a generator."""
    files = list(files)
    for file in files:
        for function in _functions_with_two_loops(file):
            loop = CallSite(file=file, line=function.second_loop, function=function.name)
            calls = (
                CallSite(file=each, line=node.lineno)
                for each in files
                if says(each, f"{function.name}(") and any(says(each, f"{name}(") for name in GENERATORS)
                for node in nodes_of(each)
                if isinstance(node, ast.Call) and call_name(node) == function.name and _gives_generator(node, function)
            )
            yield from ((loop, call) for call in islice(calls, 1))


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def _functions_with_two_loops(file: str) -> tuple[_Function, ...]:
    return tuple(
        _Function(node.name, position, argument.arg, second)
        for node in (nodes_of(file) if says(file, ".grad", "for ") else ())
        if isinstance(node, FUNCTIONS)
        for names in [
            {each.iter.id for each in node.body if isinstance(each, ast.For) and isinstance(each.iter, ast.Name)}
        ]
        for position, argument in enumerate(node.args.args if names else ())
        if argument.arg in names and (second := _second_loop(node, argument.arg)) is not None
    )


def _gives_generator(call: ast.Call, function: _Function) -> bool:
    given = next((word.value for word in call.keywords if word.arg == function.argument), None)
    if given is None and function.position < len(call.args):
        given = call.args[function.position]
    return isinstance(given, ast.Call) and call_name(given) in GENERATORS


def _second_loop(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> int | None:
    """Return the line of a loop that changes gradients of what an earlier statement of the function has used up."""
    is_used_up = False
    for statement in function.body:
        if name in bound_names(statement):  # perhaps a list of it
            return None
        is_loop = isinstance(statement, ast.For) and _is_name(statement.iter, name)
        if is_used_up and is_loop and ".grad" in ast.unparse(statement):
            return statement.lineno
        parts = [each for each in ast.walk(statement) if isinstance(each, ast.comprehension)]
        is_plain = not isinstance(statement, ast.If | ast.Try)  # else it may not run
        is_used_up |= is_plain and (is_loop or any(_is_name(each.iter, name) for each in parts))
    return None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
