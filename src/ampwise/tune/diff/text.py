"""Show a difference on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from ampwise.finding.terminal import paint, printable
from ampwise.numbers.number_text import number_text, scale_text
from ampwise.report.text_layout import shorten_middle, wrap_text
from ampwise.rules.amp53x_differences.wording import error_text, op_text, spot_text, times_text
from ampwise.tune.diff.growth import Growth
from ampwise.tune.diff.headline import difference_headline, loss_text
from ampwise.tune.diff.step_difference import (
    BACKWARD,
    FORWARD,
    ModuleRow,
    OpRow,
    ParameterRow,
    SideFacts,
    StepDifference,
)
from ampwise.tune.diff.tensor_difference import ComparedTensor

if TYPE_CHECKING:
    from ampwise.finding import Finding
    from ampwise.tune.diff.result import Difference

__all__ = [
    "MODULE_HEADINGS",
    "MOST",
    "OP_HEADINGS",
    "PARAMETER_HEADINGS",
    "difference_text",
    "growth_text",
    "module_cells",
    "noise_text",
    "op_cells",
    "parameter_cells",
    "shown_modules",
    "shown_ops",
    "shown_parameters",
    "side_text",
]

MOST = 15  # rows of a table, unless all are requested
WIDTH = 110
SHORTEST_NAME = 16
GAP, INDENT = "  ", "  "
MODULE_HEADINGS = ("module", "class", "error", "× expected", "SNR dB", "gradient", "× expected")
PARAMETER_HEADINGS = ("gradient of", "error", "cosine", "SNR dB", "largest error")
OP_HEADINGS = ("operation", "in", "error", "× expected", "line")


def difference_text(result: Difference, *, colour: bool = False, width: int = WIDTH, everything: bool = False) -> str:
    """Render the whole difference, ending in a newline; ``everything`` lists every row, in order."""
    evidence = result.evidence
    parts = [
        _opening(evidence, colour, width),
        *(_finding(finding, colour, width) for finding in result.findings),
        _modules(evidence, colour, width, everything),
        _ops(evidence, colour, width, everything),
        _parameters(evidence, colour, width, everything),
        "\n".join(wrap_text(line, width) for line in _closing(evidence)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# Selection and cells, shared with the notebook and the page


def shown_modules(evidence: StepDifference, everything: bool = False) -> list[ModuleRow]:
    """Return the modules that rounding explains least; or all, in the order of calls."""
    if everything:
        return list(evidence.rows)
    return sorted(evidence.rows, key=lambda row: (-_worst_times(row), -(row.error or 0.0)))[:MOST]


def shown_parameters(evidence: StepDifference, everything: bool = False) -> list[ParameterRow]:
    """Return the parameters with the largest errors; or all."""
    if everything:
        return list(evidence.parameters)
    return sorted(evidence.parameters, key=lambda row: -row.compared.error)[:MOST]


def shown_ops(evidence: StepDifference, everything: bool = False) -> list[OpRow]:
    """Return the operations that rounding explains least; or all."""
    if everything:
        return list(evidence.ops)
    return sorted(evidence.ops, key=lambda row: -(row.compared.times or 0.0))[:MOST]


def module_cells(row: ModuleRow) -> Iterator[tuple[str, ...]]:
    """Yield the cells of MODULE_HEADINGS: a line for the module, after one for the code before it if that is beyond."""
    made = _worst(row.inputs)
    if made is not None and made.beyond:
        yield (f"(code before {row.label})", "", _error(made), _times(made), _snr(made), "", "")
    forward, backward = _worst(row.outputs), _worst(row.gradients)
    error = f"only in {row.only}" if row.only else _error(forward)
    yield (row.label, row.kind, error, _times(forward), _snr(forward), _error(backward), _times(backward))


def parameter_cells(row: ParameterRow) -> tuple[str, ...]:
    """Return the cells of PARAMETER_HEADINGS."""
    measured = row.compared.measured
    if measured is None:
        return (row.name, row.compared.why_not, "", "", "")
    at = f" at {list(measured.largest_at)}" if measured.largest_at and measured.largest_error else ""
    largest = f"{number_text(measured.largest_error)}{at}"
    if measured.apart:
        largest = f"not finite: {measured.bad_a:,} in a, {measured.bad_b:,} in b, of {measured.values:,}"
    cosine = "" if measured.cosine is None else f"{measured.cosine:.6f}"
    return (row.name, _error(row.compared), cosine, _snr(row.compared), largest)


def op_cells(row: OpRow) -> tuple[str, ...]:
    """Return the cells of OP_HEADINGS."""
    line = f"{PurePath(row.site.file).name}:{row.site.line}" if row.site.file else ""
    where = f"{row.module or 'the model'}{' (backward)' if row.phase == BACKWARD else ''}"
    return (row.op, where, _error(row.compared), _times(row.compared), line)


def side_text(side: SideFacts) -> str:
    """Describe how a side computed, and its loss."""
    scale = "" if side.scale is None else f", loss scale {scale_text(side.scale)}"
    loss = "" if side.loss is None else f", loss {side.loss:.7g}"
    return f"{side.label} on {side.device}, unit roundoff {side.roundoff:.2g}{scale}{loss}"


def growth_text(growth: Growth | None, phase: str) -> str:
    """Describe how the error grows along the depth."""
    if growth is None:
        return ""
    what = "Forward, along the calls" if phase == FORWARD else "Backward, from the loss"
    pace = "" if growth.factor is None else f", ×{growth.factor:.3g} per module"
    return (
        f"{what}: {error_text(growth.first)} at the first of {growth.modules} modules that differ, "
        f"{error_text(growth.last)} at the last, at most {error_text(growth.largest)} (`{growth.largest_at}`){pace}."
    )


def noise_text(evidence: StepDifference) -> str:
    """Describe how two runs of one side differ."""
    if evidence.floor is None:
        return "The noise of a was not measured."
    if not evidence.floor:
        return "Two runs of a are bitwise equal."
    return f"Two runs of a differ by up to {error_text(evidence.floor)} (`{evidence.floor_at}`)."


# Sections


def _opening(evidence: StepDifference, colour: bool, width: int) -> str:
    mood = "ok" if evidence.first is None else "warning"
    lines = [paint(wrap_text(f"{difference_headline(evidence)}.", width), mood, colour)]
    if evidence.first is not None:
        lines.append(wrap_text(f"It {spot_text(evidence.first)}.{op_text(evidence.first)}", width, INDENT, 0))
    lines += [f"{INDENT}{name}  {printable(side_text(side))}" for name, side in (("a", evidence.a), ("b", evidence.b))]
    return "\n".join(lines)


def _finding(finding: Finding, colour: bool, width: int) -> str:
    head = f"{finding.severity}[{finding.rule.code}]"
    first = wrap_text(f"{head} {finding.rule.name}: {finding.message}", width, "", 0)
    place = f"{INDENT}--> {printable(str(finding.place))}"
    lines = [wrap_text(line, width, INDENT, 2) for line in f"help: {finding.fix}".split("\n")]
    return "\n".join([first.replace(head, paint(head, finding.severity, colour), 1), place, *lines])


def _modules(evidence: StepDifference, colour: bool, width: int, everything: bool) -> str:
    shown = shown_modules(evidence, everything)
    title = _title("Modules", len(shown), len(evidence.rows), everything, "in the order of calls")
    return _table(title, MODULE_HEADINGS, [cells for row in shown for cells in module_cells(row)], colour, width)


def _ops(evidence: StepDifference, colour: bool, width: int, everything: bool) -> str:
    shown = shown_ops(evidence, everything)
    title = _title("Operations", len(shown), len(evidence.ops), everything, "in their order")
    return _table(title, OP_HEADINGS, [op_cells(row) for row in shown], colour, width)


def _parameters(evidence: StepDifference, colour: bool, width: int, everything: bool) -> str:
    shown = shown_parameters(evidence, everything)
    title = _title("Gradients of parameters", len(shown), len(evidence.parameters), everything, "all")
    return _table(title, PARAMETER_HEADINGS, [parameter_cells(row) for row in shown], colour, width)


def _closing(evidence: StepDifference) -> Iterator[str]:
    if line := loss_text(evidence):
        yield line
    for phase in (FORWARD, BACKWARD):
        if line := growth_text(evidence.growth(phase), phase):
            yield line
    yield noise_text(evidence)
    yield from evidence.notes


def _title(what: str, shown: int, total: int, everything: bool, order: str) -> str:
    if everything or shown == total:
        return f"{what}, {order if everything else 'worst first'}"
    return f"{what}, the worst {shown} of {total:,} (--all shows all)"


def _worst_times(row: ModuleRow) -> float:
    """Return how far the module, or the code that made its inputs, exceeds what is expected."""
    return max([row.times, *(each.times or 0.0 for each in row.inputs)])


def _worst(compared: Sequence[ComparedTensor]) -> ComparedTensor | None:
    return max(compared, key=lambda each: (each.times or 0.0, each.error), default=None)


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


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], colour: bool, width: int) -> str:
    """Format a table; the first column takes the space left, numbers are right-aligned."""
    if not rows:
        return ""
    from rich.cells import cell_len

    cells = [headings, *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(headings))]
    space = width - sum(widths[1:]) - len(GAP) * (len(widths) - 1) - len(INDENT)
    widths[0] = min(widths[0], max(space, SHORTEST_NAME))
    is_left = [
        place < _left(headings) or heading in ("line", "largest error") for place, heading in enumerate(headings)
    ]

    def line(row: Sequence[str]) -> str:
        texts = [shorten_middle(row[0], widths[0]), *row[1:]]
        fills = [" " * (space - cell_len(text)) for text, space in zip(texts, widths, strict=True)]
        aligned = [text + fill if left else fill + text for text, fill, left in zip(texts, fills, is_left, strict=True)]
        return INDENT + GAP.join(aligned).rstrip()

    return "\n".join([paint(title, "bold", colour), paint(line(headings), "dim", colour), *map(line, cells[1:])])


def _left(headings: Sequence[str]) -> int:
    """Return how many columns at the left are names."""
    return 1 if headings is PARAMETER_HEADINGS else 2
