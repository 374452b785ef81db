"""How a message calls another line: by its number, and by file or cell where these are not the finding's own."""

from __future__ import annotations

import ast

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from ampwise.finding import Place
    from ampwise.source.frame import Frame

__all__ = ["spot"]


def spot(node: ast.AST, frame: Frame, seen_from: Place) -> str:
    """``line 8``; seen from elsewhere ``line 8 of train.py`` or, in a notebook, ``line 8 of cell 3``."""
    place = frame.outline.script.place(node)
    if place.file != seen_from.file:
        return f"line {place.line} of {place.file}"
    return f"line {place.line}" + ("" if place.cell == seen_from.cell else f" of cell {place.cell}")
