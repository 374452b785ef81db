"""What an ``if`` asked, in the words of the script."""

from __future__ import annotations

import ast
import functools

from ampwise.source.events import Guard

__all__ = ["question"]


def question(guard: Guard) -> str:
    """The source of a guard's test, to look for words in.

    Its ``text`` is for comparing: it has keys in it, and with them the path of the file.
    """
    return _written(guard.test) if guard.test is not None else ""


@functools.lru_cache(maxsize=1024)  # one test guards many statements
def _written(test: ast.expr) -> str:
    return ast.unparse(test)
