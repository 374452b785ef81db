"""Source text of the conditions of ``if``s."""

from __future__ import annotations

import ast
import functools

from ampwise.check.source.events import BranchGuard

__all__ = ["guard_source"]


def guard_source(guard: BranchGuard) -> str:
    """Return the source of a guard's test, to search for words.

    The guard's ``text`` is for comparison only: it contains keys, and with them the path of the file.
    """
    return _written(guard.test) if guard.test is not None else ""


@functools.lru_cache(maxsize=1024)  # one test guards many statements
def _written(test: ast.expr) -> str:
    return ast.unparse(test)
