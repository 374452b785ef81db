"""Show a difference in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ampwise.finding.html import badge, bold, box, code, finding_html, paragraph, prose, table, text
from ampwise.tune.diff.headline import difference_headline, loss_text
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD
from ampwise.tune.diff.text import (
    MODULE_HEADINGS,
    OP_HEADINGS,
    PARAMETER_HEADINGS,
    growth_text,
    module_cells,
    noise_text,
    op_cells,
    parameter_cells,
    shown_modules,
    shown_ops,
    shown_parameters,
    side_text,
)

if TYPE_CHECKING:
    from ampwise.tune.diff.result import Difference

__all__ = ["difference_html"]


def difference_html(result: Difference) -> str:
    """Render the verdict, the findings and the worst rows."""
    evidence = result.evidence
    mood = "ok" if result.explained else str(result.findings[0].severity)
    head = paragraph(f"{badge('diff', mood)} <b>{prose(difference_headline(evidence))}</b>")
    sides = "".join(
        paragraph(f"{name} {code(side_text(side))}") for name, side in (("a", evidence.a), ("b", evidence.b))
    )
    growths = [growth_text(evidence.growth(phase), phase) for phase in (FORWARD, BACKWARD)]
    modules = [cells for row in shown_modules(evidence) for cells in module_cells(row)]
    lines = [loss_text(evidence), *growths, noise_text(evidence), *evidence.notes]
    return "".join(
        [
            box(head + sides + "".join(paragraph(prose(line), soft=True) for line in lines if line), mood),
            *map(finding_html, result.findings),
            _table("Modules, worst first", MODULE_HEADINGS, modules, 2),
            _table("Operations, worst first", OP_HEADINGS, map(op_cells, shown_ops(evidence)), 2),
            _table(
                "Gradients as the optimizer gets them, worst first",
                PARAMETER_HEADINGS,
                map(parameter_cells, shown_parameters(evidence)),
                1,
            ),
        ]
    )


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    cells = [[code(first), *map(text, rest)] for first, *rest in rows]
    return paragraph(bold(title)) + table(headings, cells, left=left) if cells else ""
