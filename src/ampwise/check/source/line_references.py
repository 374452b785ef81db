"""References to other lines in messages: the number, and the file or cell if it is not the finding's own."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.check.source.frame import Frame
    from ampwise.finding import Place


def spot(node: ast.AST, frame: Frame, seen_from: Place) -> str:
    """Return ``line 8``, or from another file ``line 8 of train.py``, from another cell ``line 8 of cell 3``."""
    place = frame.outline.script.place(node)
    if place.file != seen_from.file:
        return f"line {place.line} of {place.file}"
    return f"line {place.line}" + ("" if place.cell == seen_from.cell else f" of cell {place.cell}")
