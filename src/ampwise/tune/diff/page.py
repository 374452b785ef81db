"""Build the HTML page of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.finding.terminal import printable
from ampwise.report.page import difference_page
from ampwise.report.page.run_view import MORE_CONTEXT, finding_card, rules_of, severity_chips
from ampwise.report.page.templates import plain
from ampwise.report.source_lines import SourceFiles
from ampwise.runs.rows import CountedFinding
from ampwise.tune.diff.headline import BASES, remarks, side_texts
from ampwise.tune.diff.tensor_difference import BEYOND, ComparedTensor
from ampwise.tune.diff.text import difference_tables, mood_of
from ampwise.tune.diff.wording import op_text, spot_text

if TYPE_CHECKING:
    from ampwise.finding import Finding
    from ampwise.tune.diff.result import Difference

MOST_MODULES, MOST_OPS, MOST_PARAMETERS = 1000, 300, 400


def render_page(result: Difference) -> str:
    """Return one self-contained HTML file."""
    evidence, first = result.evidence, result.evidence.first
    here = str(Path.cwd())
    cards = [
        finding_card(CountedFinding(finding=finding, excerpt=_excerpt(finding)), f"finding-{number}", folder=here)
        for number, finding in enumerate(result.findings, 1)
    ]
    modules, ops, parameters = difference_tables(evidence, None, MOST_OPS, MOST_PARAMETERS)
    differing = [row for row in parameters.rows if row[1] not in ("0", "")]
    sections = {
        "depth": ("Error by depth", evidence.rows),
        "findings": ("Findings", cards),
        "modules": ("Modules", modules.rows),
        "ops": ("Operations", ops.rows),
        "gradients": ("Gradients", parameters.rows),
        "rules": ("Rules", cards),
    }
    sides, _, said = result.verdict.partition(": ")
    headline = f"{said[0].upper()}{said[1:]}" if said else sides
    shown = {
        "title": f"{plain(headline)} · {sides} · {evidence.name}",
        "headline": headline,
        "mood": mood_of(result),
        "chips": severity_chips(cards),
        "nav": [(name, title) for name, (title, found) in sections.items() if found],
        "first": "" if first is None else f"It {spot_text(first)}.{op_text(first)}",
        "name": evidence.name,
        "sides": side_texts(evidence).items(),
        "notes": remarks(evidence),
        "basis": f"Errors are {BASES['errors']}. Marks at the top of a chart are infinite.",
        "cards": cards,
        "rules": rules_of(cards),
        "module_headings": modules.headings,
        "modules": modules.rows[:MOST_MODULES],
        "modules_left": len(modules.rows) - MOST_MODULES,
        "op_headings": ops.headings,
        "ops": ops.rows,
        "ops_left": ops.total - ops.shown,
        "parameter_headings": parameters.headings,
        "parameters": differing,
        "same_parameters": len(parameters.rows) - len(differing),
        "parameters_left": parameters.total - parameters.shown,
    }
    rows = [row for row in evidence.rows if row.is_leaf]
    outputs, gradients = [row.outputs for row in rows], [row.gradients for row in rows]
    made = [(*row.inputs, *row.outputs) for row in rows]
    charts = {
        "limit": f"{BEYOND:.0f}",
        "names": [printable(row.label if row.label == row.kind else f"{row.label} ({row.kind})") for row in rows],
        "passes": [
            _chart("Forward: outputs", 0, outputs, made),
            _chart("Backward: their gradients", 1, gradients, gradients),
        ],
    }
    return difference_page(shown, charts)


def _excerpt(finding: Finding) -> dict[str, Any]:
    """Return the source lines near a place, as they are now."""
    file, line = finding.place.file, finding.place.line
    if file is None or line is None:
        return {}
    first = max(1, line - MORE_CONTEXT)
    return {"first_line": first, "lines": SourceFiles().lines(file)[first - 1 : line + MORE_CONTEXT]}


def _chart(
    title: str,
    number: int,
    compared: Sequence[Sequence[ComparedTensor]],
    judged: Sequence[Sequence[ComparedTensor]],
) -> dict[str, Any]:
    """Return one chart. ``judged`` includes the code before each module, whose error is shown if it is beyond."""
    shown = [
        max([each for each in all_ if each.beyond] or own, key=lambda each: each.error, default=None)
        for own, all_ in zip(compared, judged, strict=True)
    ]
    errors = [None if each is None else each.error for each in shown]
    limits = [None if each is None or each.expected is None else BEYOND * each.expected for each in shown]
    return {
        "title": title,
        "colour": f"--line{number}",
        "key": f"line{number}",
        "errors": list(map(_rounded, errors)),
        "explained": list(map(_rounded, limits)),
        "beyond": [place for place, each in enumerate(shown) if each is not None and each.beyond],
        "infinite": [place for place, error in enumerate(errors) if error is not None and math.isinf(error)],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
