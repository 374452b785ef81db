"""Build the HTML page of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.finding.terminal import printable
from ampwise.report.formatting import evidence_line
from ampwise.report.page.difference_page import difference_page
from ampwise.report.page.run_view import MORE_CONTEXT, FindingCard, rules_of
from ampwise.report.source_lines import recorded_lines
from ampwise.rules.amp53x_differences.wording import op_text, spot_text
from ampwise.runs.rows import CountedFinding
from ampwise.tune.diff.headline import BASES, difference_headline, loss_text
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, ModuleRow, StepDifference
from ampwise.tune.diff.tensor_difference import BEYOND, ComparedTensor
from ampwise.tune.diff.text import (
    MODULE_HEADINGS,
    OP_HEADINGS,
    PARAMETER_HEADINGS,
    growth_text,
    module_cells,
    noise_text,
    op_cells,
    parameter_cells,
    side_text,
)

if TYPE_CHECKING:
    from ampwise.finding import Finding
    from ampwise.tune.diff.result import Difference

__all__ = ["render_page"]

MOST_MODULES, MOST_OPS, MOST_PARAMETERS = 1000, 300, 400
LARGEST_FILE = 2**21  # bytes of a source file to quote lines from


def render_page(result: Difference) -> str:
    """Return one self-contained HTML file."""
    return difference_page(_view(result), _charts(result.evidence))


def _view(result: Difference) -> dict[str, Any]:
    evidence = result.evidence
    cards = [_card(finding, f"finding-{number}") for number, finding in enumerate(result.findings, 1)]
    growths = [growth_text(evidence.growth(phase), phase) for phase in (FORWARD, BACKWARD)]
    parameters = sorted(evidence.parameters, key=lambda row: -row.compared.error)
    ops = sorted(evidence.ops, key=lambda row: -(row.compared.times or 0.0))
    modules = [cells for row in evidence.rows for cells in module_cells(row)]
    return {
        "title": f"{difference_headline(evidence)}.",
        "mood": "ok" if result.explained else str(result.findings[0].severity),
        "first": "" if evidence.first is None else f"It {spot_text(evidence.first)}.{op_text(evidence.first)}",
        "sides": [("subject", evidence.subject), ("a", side_text(evidence.a)), ("b", side_text(evidence.b))],
        "notes": [text for text in (loss_text(evidence), *growths, noise_text(evidence), *evidence.notes) if text],
        "beyond": f"{BEYOND:.0f}",
        "basis": f"Errors are {BASES['errors']}.",
        "cards": cards,
        "rules": rules_of(cards),
        "module_headings": MODULE_HEADINGS,
        "modules": modules[:MOST_MODULES],
        "modules_left": len(modules) - MOST_MODULES,
        "op_headings": OP_HEADINGS,
        "ops": [op_cells(row) for row in ops[:MOST_OPS]],
        "ops_left": len(ops) - MOST_OPS,
        "parameter_headings": PARAMETER_HEADINGS,
        "parameters": [parameter_cells(row) for row in parameters[:MOST_PARAMETERS]],
        "parameters_left": len(parameters) - MOST_PARAMETERS,
    }


def _card(finding: Finding, name: str) -> FindingCard:
    counted = CountedFinding(finding=finding, excerpt=_excerpt(finding))
    return FindingCard(
        id=name,
        counted=counted,
        place=str(finding.place) if finding.place.as_dict() else "",
        details=[evidence_line(finding.shown_evidence)] if finding.shown_evidence else [],
        lines=recorded_lines(counted),
        more_lines={},
        diff="",
        example="",
    )


def _excerpt(finding: Finding) -> dict[str, Any]:
    """Return the source lines near a place, as they are now."""
    file, line = finding.place.file, finding.place.line
    if file is None or line is None:
        return {}
    try:
        path = Path(file)
        lines = path.read_text(encoding="utf-8").split("\n") if path.stat().st_size <= LARGEST_FILE else []
    except (OSError, ValueError):
        return {}
    first = max(1, line - MORE_CONTEXT)
    return {"first_line": first, "lines": lines[first - 1 : line + MORE_CONTEXT]}


def _charts(evidence: StepDifference) -> dict[str, Any]:
    rows = [row for row in evidence.rows if row.is_leaf]
    forward = [(*row.inputs, *row.outputs) for row in rows]
    return {
        "names": [printable(_called(row)) for row in rows],
        "passes": [
            _pass("Forward: what modules return", "--line0", "line0", [row.outputs for row in rows], forward),
            _pass("Backward: gradients of what modules return", "--line1", "line1", [row.gradients for row in rows]),
        ],
    }


def _called(row: ModuleRow) -> str:
    return row.label if row.label == row.kind else f"{row.label} ({row.kind})"


def _pass(
    title: str,
    colour: str,
    key: str,
    compared: Sequence[Sequence[ComparedTensor]],
    judged: Sequence[Sequence[ComparedTensor]] | None = None,
) -> dict[str, Any]:
    """Return one chart. ``judged`` includes the code before each module, whose error is shown if it is beyond."""
    shown = [_worst(own, of) for own, of in zip(compared, judged or compared, strict=True)]
    errors = [None if each is None else each.error for each in shown]
    limits = [None if each is None or each.expected is None else BEYOND * each.expected for each in shown]
    return {
        "title": title,
        "colour": colour,
        "key": key,
        "errors": [_rounded(error) for error in errors],
        "explained": [_rounded(limit) for limit in limits],
        "beyond": [place for place, each in enumerate(shown) if each is not None and each.beyond],
        "infinite": [place for place, error in enumerate(errors) if error is not None and math.isinf(error)],
    }


def _worst(own: Sequence[ComparedTensor], judged: Sequence[ComparedTensor]) -> ComparedTensor | None:
    beyond = [each for each in judged if each.beyond]
    return max(beyond or own, key=lambda each: each.error, default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
