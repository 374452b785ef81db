"""End a ``with`` block earlier: its last statements are moved out of it by taking back their indentation."""

from __future__ import annotations

import ast

from ampwise.check.source.script import SourceScript
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Edit


def end_block_before(script: SourceScript, block: ast.With, index: int) -> Edit | None:
    """Return the edit that moves ``block.body[index:]`` out of ``block``; None if the layout does not allow it.

    Comments above and below the statements move with them; lines inside strings stay as they are.
    """
    lines = script.lines
    first, last, before = block.body[index], block.body[-1], block.body[index - 1]
    outer = _margin(lines[script.span(block)[0][0] - 1])
    (start_line, start_column), (previous_line, previous_column) = script.span(first)[0], script.span(before)[1]
    end_line = script.span(last)[1][0]
    shares_line = previous_line == start_line
    inner = _margin(lines[script.span(block.body[0])[0][0] - 1])
    is_on_header = script.span(block.body[0])[0][0] == script.span(block)[0][0]
    if index < 1 or lines[start_line - 2].endswith("\\"):
        return None
    if not is_on_header and not (inner.startswith(outer) and len(inner) > len(outer)):
        return None  # spaces and tabs are mixed
    if not shares_line and (is_on_header or lines[start_line - 1][: start_column - 1] != inner):
        return None
    protected: set[int] = set()
    for node in [node for statement in block.body[index:] for node in walk(statement)]:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        if isinstance(node, ast.JoinedStr | ast.Constant) and (is_text or isinstance(node, ast.JoinedStr)):
            protected.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    first_line = start_line
    if not is_on_header:
        while not shares_line and first_line - 1 > previous_line and _is_comment(lines[first_line - 2], inner):
            first_line -= 1
        below = len(lines) if script.cells else end_line  # the next line may be another cell's
        while below < len(lines) and (not lines[below].strip() or _is_comment(lines[below], inner)):
            below += 1
            end_line = below if lines[below - 1].strip() else end_line
    moved = []
    for number in range(first_line, end_line + 1):
        line = lines[number - 1]
        if shares_line and number == start_line:
            moved.append(f"\n{outer}{line[start_column - 1 :]}")
        elif number not in protected and not is_on_header and line.startswith(inner):
            moved.append(outer + line[len(inner) :])
        else:
            moved.append(line)
    start = (previous_line, previous_column) if shares_line else (first_line, 1)
    return script.edit(*start, end_line, len(lines[end_line - 1]) + 1, "\n".join(moved))


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def _is_comment(line: str, margin: str) -> bool:
    return line.startswith(f"{margin}#")
