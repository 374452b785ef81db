"""What the conditions of ``if``s ask: their source, and that of what they depend on."""

from __future__ import annotations

import ast
import functools

from ampwise.check.source.cases import guards_around
from ampwise.check.source.events import BranchGuard
from ampwise.check.source.frame import Frame
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.tree_walk import walk

FOLLOW = 3  # names and calls between a test and what it asks
LONGEST = 40  # lines of a function that only answers a question
_written = functools.lru_cache(maxsize=1024)(ast.unparse)  # one test guards many statements


def guard_source(guard: BranchGuard) -> str:
    """Return the source of a guard's test, to search for words.

    The guard's ``text`` is for comparison only: it contains keys, and with them the path of the file.
    """
    return _written(guard.test) if guard.test is not None else ""


def guard_meaning(guard: BranchGuard) -> str:
    """Return the source of a guard's test, with the values of its names and the functions that it calls.

    For ``if valid:``, that is ``valid = all(torch.isfinite(g).all() for g in grads)``, or the test under which a flag
    is set: ``if torch.isnan(norm): valid = False``.
    """
    if guard.test is None or guard.frame is None:
        return guard_source(guard)
    return _meaning(guard.test, guard.frame)


@functools.lru_cache(maxsize=256)
def _meaning(test: ast.expr, frame: Frame) -> str:
    texts = [_written(test)]
    pending: list[tuple[ast.expr, Frame, int]] = [(test, frame, 0)]
    seen: set[FunctionOutline | str] = set()
    for expression, home, depth in pending:
        for part in walk(expression) if depth < FOLLOW else ():
            if isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                function = home.function.home_of(part.id)
                for binding in function.bindings.get(part.id, ()) if function is home.function else ():
                    if isinstance(binding.value, ast.Constant | ast.Name) and isinstance(binding.node, ast.stmt):
                        tests = [each.test for each in guards_around(binding.node, binding.function)]
                        texts += [_written(each) for each in tests if isinstance(each, ast.expr)]
                    elif binding.value is not None:
                        texts.append(_written(binding.value))
                        pending.append((binding.value, home, depth + 1))
            elif isinstance(part, ast.Call):
                target = home.callee(part)
                if target is not None and target[0] not in seen and _is_short(target[0]):
                    seen.add(target[0])
                    texts += [_written(each) for each in target[0].body]
    return "\n".join(texts)


def _is_short(function: FunctionOutline) -> bool:
    return function.lines[1] - function.lines[0] < LONGEST and not isinstance(function.node, ast.Module)
