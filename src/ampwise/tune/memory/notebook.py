"""Show a memory estimate in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding.html import bold, box, paragraph, table, text
from ampwise.tune.memory.text import CAPTION, headline, lines, title, verdicts

if TYPE_CHECKING:
    from ampwise.tune.memory.result import MemoryEstimate

__all__ = ["memory_html"]


def memory_html(result: MemoryEstimate) -> str:
    """Render a table for each batch size, the verdicts, and the assumptions."""
    parts = [box(paragraph(bold(headline(result))), "info")]
    for batch in result.batches:
        rows = [
            [bold(line.label) if line.strong else text(line.label), *map(text, line.cells), text(line.basis)]
            for line in lines(result, batch)
        ]
        parts.append(table([title(result, batch), *result.precisions, "basis"], rows))
    parts += [paragraph(text(sentence)) for sentence in verdicts(result)]
    parts += [paragraph(text(note), soft=True) for note in (CAPTION, *result.notes)]
    return "".join(parts)
