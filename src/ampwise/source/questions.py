"""What an ``if`` asked, in the words of the script."""

from __future__ import annotations

import ast

from ampwise.source.events import Guard

__all__ = ["question"]


def question(guard: Guard) -> str:
    """The source of a guard's test, to look for words in.

    Its ``text`` is for comparing: it has keys in it, and with them the path of the file.
    """
    return ast.unparse(guard.test) if guard.test is not None else ""
