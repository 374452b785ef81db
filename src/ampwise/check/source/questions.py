"""Source text of the conditions of ``if``s."""

from __future__ import annotations

import ast
import functools

from ampwise.check.source.events import BranchGuard

_written = functools.lru_cache(maxsize=1024)(ast.unparse)  # one test guards many statements


def guard_source(guard: BranchGuard) -> str:
    """Return the source of a guard's test, to search for words.

    The guard's ``text`` is for comparison only: it contains keys, and with them the path of the file.
    """
    return _written(guard.test) if guard.test is not None else ""
