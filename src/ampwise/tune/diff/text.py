"""Show a difference on a terminal and in a notebook; the tables are also those of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ampwise.finding import html
from ampwise.finding.terminal import paint, printable
from ampwise.numbers.number_text import number_text
from ampwise.report.text_layout import INDENT, text_table, wrap_text
from ampwise.tune.diff.headline import remarks, side_texts
from ampwise.tune.diff.step_difference import BACKWARD, ModuleRow, OpRow, ParameterRow, StepDifference
from ampwise.tune.diff.tensor_difference import ComparedTensor
from ampwise.tune.diff.wording import error_text, op_text, spot_text, times_text

if TYPE_CHECKING:
    from ampwise.finding import Finding
    from ampwise.tune.diff.result import Difference

MOST = 15  # rows of a table, unless all are requested
WIDTH = 110


class DifferenceTable(NamedTuple):
    """A table of a difference; ``shown`` of ``total`` modules, operations or parameters are in it."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    shown: int
    total: int
    left: tuple[int, ...]  # columns that are left-aligned; numbers are right-aligned


def difference_tables(
    evidence: StepDifference, modules: int | None = MOST, ops: int | None = MOST, parameters: int | None = MOST
) -> tuple[DifferenceTable, DifferenceTable, DifferenceTable]:
    """Return the tables of modules, operations and parameters: so many of each, worst first; None: all, in order."""
    shown_modules: Sequence[ModuleRow] = evidence.rows
    if modules is not None:  # those first that rounding explains least, or the code that made their inputs
        shown_modules = sorted(
            evidence.rows,
            key=lambda row: (-max([row.times, *(each.times or 0.0 for each in row.inputs)]), -(row.error or 0.0)),
        )[:modules]
    shown_ops: Sequence[OpRow] = evidence.ops
    if ops is not None:
        shown_ops = sorted(evidence.ops, key=lambda row: -(row.compared.times or 0.0))[:ops]
    shown_parameters: Sequence[ParameterRow] = evidence.parameters
    if parameters is not None:
        shown_parameters = sorted(evidence.parameters, key=lambda row: -row.compared.error)[:parameters]
    return (
        DifferenceTable(
            ("module", "class", "error", "× expected", "SNR dB", "gradient", "× expected"),
            [cells for row in shown_modules for cells in _module_cells(row)],
            len(shown_modules),
            len(evidence.rows),
            left=(0, 1),
        ),
        DifferenceTable(
            ("operation", "in", "error", "× expected", "line"),
            list(map(_op_cells, shown_ops)),
            len(shown_ops),
            len(evidence.ops),
            left=(0, 1, 4),
        ),
        DifferenceTable(
            ("gradient of", "error", "cosine", "SNR dB", "largest error"),
            list(map(_parameter_cells, shown_parameters)),
            len(shown_parameters),
            len(evidence.parameters),
            left=(0, 4),
        ),
    )


def _module_cells(row: ModuleRow) -> Iterator[tuple[str, ...]]:
    """Yield a line for the module, after one for the code before it if that is beyond."""

    def worst(compared: Sequence[ComparedTensor]) -> ComparedTensor | None:
        return max(compared, key=lambda each: (each.times or 0.0, each.error), default=None)

    made, forward, backward = worst(row.inputs), worst(row.outputs), worst(row.gradients)
    if made is not None and made.beyond:
        yield (f"(code before {row.label})", "", _error(made), _times(made), _snr(made), "", "")
    error = f"only in {row.only}" if row.only else _error(forward)
    yield (row.label, row.kind, error, _times(forward), _snr(forward), _error(backward), _times(backward))


def _op_cells(row: OpRow) -> tuple[str, ...]:
    line = f"{PurePath(row.site.file).name}:{row.site.line}" if row.site.file else ""
    where = f"{row.module or 'the model'}{' (backward)' if row.phase == BACKWARD else ''}"
    return (row.op, where, _error(row.compared), _times(row.compared), line)


def _parameter_cells(row: ParameterRow) -> tuple[str, ...]:
    measured = row.compared.measured
    if measured is None:
        return (row.name, row.compared.why_not, "", "", "")
    at = f" at {list(measured.largest_at)}" if measured.largest_at and measured.largest_error else ""
    largest = f"{number_text(measured.largest_error)}{at}"
    if measured.apart:
        largest = f"not finite: {measured.bad_a:,} in a, {measured.bad_b:,} in b, of {measured.values:,}"
    cosine = "" if measured.cosine is None else f"{measured.cosine:.6f}"
    return (row.name, _error(row.compared), cosine, _snr(row.compared), largest)


def _error(compared: ComparedTensor | None) -> str:
    if compared is None:
        return ""
    if compared.why_not:
        return "shapes"
    measured = compared.measured
    return f"{measured.changed} differ" if measured is not None and measured.changed else error_text(compared.error)


def _times(compared: ComparedTensor | None) -> str:
    if compared is None or compared.times is None:
        return ""
    return f"{times_text(compared.times)}{' !' if compared.beyond else ''}"


def _snr(compared: ComparedTensor | None) -> str:
    snr = None if compared is None or compared.measured is None else compared.measured.snr_db
    return "" if snr is None else f"{snr:.0f}"


# On a terminal


def difference_text(result: Difference, *, colour: bool = False, width: int = WIDTH, everything: bool = False) -> str:
    """Render the whole difference, ending in a newline; ``everything`` lists every row, in order."""
    evidence, first, most = result.evidence, result.evidence.first, None if everything else MOST
    opening = [paint(wrap_text(f"{result.verdict}.", width), "ok" if first is None else "warning", colour)]
    if first is not None:
        opening.append(wrap_text(f"It {spot_text(first)}.{op_text(first)}", width, INDENT, 0))
    opening += [f"{INDENT}{name}  {printable(side)}" for name, side in side_texts(evidence).items()]
    parts = ["\n".join(opening), *(_finding(finding, colour, width) for finding in result.findings)]
    titles = {
        "Modules": "in the order of calls",
        "Operations": "in their order",
        "Gradients of parameters": "all",
    }
    tables = difference_tables(evidence, most, most, most)
    for (title, order), table in zip(titles.items(), tables, strict=True):
        if everything or table.shown == table.total:
            heading = f"{title}, {order if everything else 'worst first'}"
        else:
            heading = f"{title}, the worst {table.shown} of {table.total:,} (-v shows all)"
        if table.rows:
            rows = [[printable(cell) for cell in row] for row in table.rows]
            lines = text_table(table.headings, rows, colour=colour, width=width, left=table.left)
            parts.append("\n".join([paint(heading, "bold", colour), *lines]))
    parts.append("\n".join(wrap_text(line, width) for line in remarks(evidence)))
    return "\n\n".join(parts) + "\n"


def _finding(finding: Finding, colour: bool, width: int) -> str:
    head = f"{finding.severity.word}[{finding.rule.code}]"
    first = wrap_text(f"{head} {finding.rule.name}: {finding.message}", width, "", 0)
    place = f"{INDENT}--> {printable(str(finding.place))}"
    lines = [wrap_text(line, width, INDENT, 2) for line in f"help: {finding.fix}".split("\n")]
    return "\n".join([first.replace(head, paint(head, finding.severity, colour), 1), place, *lines])


# In a notebook


def mood_of(result: Difference) -> str:
    """Return the severity of the first finding; "ok" if rounding explains everything."""
    return "ok" if result.explained else str(result.findings[0].severity)


def difference_html(result: Difference) -> str:
    """Render the verdict, the findings and the worst rows."""
    evidence, mood = result.evidence, mood_of(result)
    head = html.paragraph(f"{html.badge('diff', mood)} <b>{html.prose(result.verdict)}</b>")
    sides = [html.paragraph(f"{name} {html.code(side)}") for name, side in side_texts(evidence).items()]
    lines = [html.paragraph(html.prose(line), soft=True) for line in remarks(evidence)]
    parts = [html.box("".join([head, *sides, *lines]), mood), *map(html.finding_html, result.findings)]
    titles = ("Modules", "Operations", "Gradients as the optimizer gets them")
    for title, table in zip(titles, difference_tables(evidence), strict=True):
        if table.rows:
            cells = [[html.code(first), *map(html.text, rest)] for first, *rest in table.rows]
            left = 2 if 1 in table.left else 1
            parts.append(
                html.paragraph(html.bold(f"{title}, worst first")) + html.table(table.headings, cells, left=left)
            )
    return "".join(parts)
