"""Fit text to the terminal: wrap lines, and shorten names in the middle."""

from __future__ import annotations

import textwrap

from ampwise.finding.terminal import printable

__all__ = ["shorten_middle", "wrap_text"]


def shorten_middle(name: str, width: int) -> str:
    """Shorten a long name in the middle: its start names the block, its end the weight."""
    from rich.cells import cell_len, chop_cells, set_cell_size

    if cell_len(name) <= width:
        return name
    tail = "".join(reversed(chop_cells(name[::-1], (width - 1) // 2)[0]))
    return set_cell_size(name, width - 1 - cell_len(tail)).rstrip() + "…" + tail


def wrap_text(text: str, width: int, indent: str = "", hang: int = 4) -> str:
    """Wrap a sentence; a word longer than a line, such as a path, is not broken."""
    after = indent + " " * hang if indent else ""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )
