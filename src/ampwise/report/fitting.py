"""Text that fits a terminal: wrapped lines, and names without their middle."""

from __future__ import annotations

import textwrap

from ampwise.printers.terminal import printable

__all__ = ["cropped", "wrapped"]


def cropped(name: str, width: int) -> str:
    """A long name without its middle: the start says which block, the end which weight."""
    from rich.cells import cell_len, chop_cells, set_cell_size

    if cell_len(name) <= width:
        return name
    tail = "".join(reversed(chop_cells(name[::-1], (width - 1) // 2)[0]))
    return set_cell_size(name, width - 1 - cell_len(tail)).rstrip() + "…" + tail


def wrapped(text: str, width: int, indent: str = "", hang: int = 4) -> str:
    """A sentence over as many lines as it takes; a word longer than a line, such as a path, stays whole."""
    after = indent + " " * hang if indent else ""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )
