"""An estimate as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.printers.html import bold, box, paragraph, table, text
from ampwise.tune.memory.text import CAPTION, headline, lines, title, verdicts

if TYPE_CHECKING:
    from ampwise.tune.memory.result import MemoryEstimate

__all__ = ["memory_html"]


def memory_html(result: MemoryEstimate) -> str:
    """The table of each size of batch, what follows, what was assumed."""
    parts = [box(paragraph(bold(headline(result))), "info")]
    for batch in result.batches:
        rows = [
            [bold(line.label) if line.strong else text(line.label), *map(text, line.cells), text(line.basis)]
            for line in lines(result, batch)
        ]
        parts.append(table([title(result, batch), *result.precisions, "basis"], rows))
    parts += [paragraph(text(said)) for said in verdicts(result)]
    parts += [paragraph(text(note), soft=True) for note in (CAPTION, *result.notes)]
    return "".join(parts)
