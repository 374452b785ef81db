"""The template variables of a run's page."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ampwise.finding import Place, Rule
from ampwise.report.activations import ABOUT, HEADINGS, MOST_MODULES, activations_of
from ampwise.report.dtype_flow import count_output_dtypes, dtype_flow_of
from ampwise.report.event_log import latest_events
from ampwise.report.formatting import evidence_line, format_short, format_time
from ampwise.report.headline_numbers import headline_numbers_of
from ampwise.report.layers import describe_layers, layers_headings, layers_title
from ampwise.report.page.chart_data import shown_layers
from ampwise.report.resource_usage import device_time_by_kind, largest_matmuls, memory, waiting_lines, work_by_precision
from ampwise.report.run_facts import environment, sentences, settings, timing
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import occurrence, opening, run_mood, verdict, worst_first

if TYPE_CHECKING:
    from ampwise.report.layers import LayerGradients
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import CountedFinding

__all__ = ["FindingCard", "finding_card", "rules_of", "run_view"]

MOST_FINDINGS = 300
MOST_EVENTS = 300
MOST_MODULES_RUN = 1000
MORE_CONTEXT = 8  # lines around a finding in the folded part
LONGEST_LINE = 400  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingCard:
    """A finding with everything that its card shows."""

    id: str
    counted: CountedFinding
    place: str  # with the file relative to the run's folder
    details: list[str]
    lines: dict[int, str]
    more_lines: dict[int, str]
    diff: str
    example: str  # the rule's example as a diff, if the finding has no diff

    @property
    def rule(self) -> Rule:
        return self.counted.finding.rule


def run_view(run: Run, layers: Sequence[LayerGradients]) -> dict[str, Any]:
    """Return the variables of page.html."""
    findings = worst_first(run.merged_findings())
    cards = [finding_card(one, run, f"finding-{number}") for number, one in enumerate(findings, 1)]
    events, earlier_events = latest_events(run, MOST_EVENTS)
    flow = dtype_flow_of(run)
    modules = activations_of(run)
    return {
        "title": verdict(run),
        "mood": run_mood(run),
        "opening": opening(run),
        "when": _when(run),
        "command": _command(run),
        "numbers": headline_numbers_of(run),
        "cards": cards[:MOST_FINDINGS],
        "cards_left": len(cards) - MOST_FINDINGS,
        "events": events,
        "events_left": earlier_events,
        "settings": [(f"{one.name}={format_short(one.value)}", one.reason) for one in settings(run)],
        "layers": _layers(layers),
        "modules": {"rows": [one.cells for one in modules[:MOST_MODULES]], "headings": HEADINGS, "about": ABOUT},
        "modules_left": len(modules) - MOST_MODULES,
        "timing": timing(run),
        "kinds": device_time_by_kind(run),
        "precisions": work_by_precision(run),
        "products": largest_matmuls(run),
        "waiting": waiting_lines(run),
        "memory": memory(run),
        "flow": flow[:MOST_MODULES_RUN],
        "flow_left": len(flow) - MOST_MODULES_RUN,
        "flow_about": count_output_dtypes(flow),
        "fine": sentences(run, "what_was_fine"),
        "not_measured": sentences(run, "not_measured"),
        "trouble": run.trouble,
        "rules": rules_of(cards[:MOST_FINDINGS]),
        "environment": [(name, format_short(value)) for name, value in _flat(environment(run))],
        "folder": str(run.folder),
    }


def rules_of(found: Iterable[FindingCard]) -> list[Rule]:
    """Return the rules that the cards link to, each once, by code."""
    rules = {card.rule.code: card.rule for card in found}
    return [rules[code] for code in sorted(rules)]


def finding_card(counted: CountedFinding, run: Run, name: str) -> FindingCard:
    """Return the card of a finding. name: the id of its element in the page."""
    finding = counted.finding
    lines, more = recorded_lines(counted), recorded_lines(counted, MORE_CONTEXT)
    return FindingCard(
        id=name,
        counted=counted,
        place=_place(finding.place, run),
        details=[text for text in (evidence_line(finding.shown_evidence), occurrence(counted)) if text],
        lines=_drawn(lines),
        more_lines=_drawn(more) if len(more) > len(lines) else {},
        diff=counted.diff,
        example="" if counted.diff else _example(finding.rule),
    )


def _place(place: Place, run: Run) -> str:
    if place.file is not None:
        place = place.but(file=place.file.removeprefix(f"{run.environment.get('folder')}/"))
    return str(place) if place.as_dict() else ""


def _drawn(lines: Mapping[int, str]) -> dict[int, str]:
    return {number: line.expandtabs(4)[:LONGEST_LINE] for number, line in lines.items()}


def _example(rule: Rule) -> str:
    """Return the diff between the rule's bad and good example."""
    changed = difflib.unified_diff(rule.bad.splitlines(), rule.good.splitlines(), lineterm="", n=100)
    return "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@")))


def _when(run: Run) -> str:
    times = [format_time(str(run.manifest[part])) for part in ("created", "finished") if run.manifest.get(part)]
    return f"From {' to '.join(times)}." if len(times) == 2 else f"Started {times[0]}." if times else ""


def _command(run: Run) -> str:
    """Return the command as typed, without the Python interpreter, which the environment names."""
    command = run.manifest.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    if words[1:3] == ["-m", "ampwise"]:
        words = words[2:]
    elif [PurePath(word).name for word in words[1:2]] == ["ampwise"]:
        words = ["ampwise", *words[2:]]
    return shlex.join(words)


def _layers(layers: Sequence[LayerGradients]) -> dict[str, Any]:
    if not layers:
        return {"rows": [], "title": "Layers", "about": "", "headings": [], "left": 0}
    several = len({layer.optimizer for layer in layers}) > 1
    shown = shown_layers(layers)
    return {
        "rows": [_layer(layer, several) for layer in shown],
        "title": layers_title(layers),
        "about": describe_layers(layers),
        "headings": layers_headings(layers),
        "left": len(layers) - len(shown),
    }


def _layer(layer: LayerGradients, several: bool) -> dict[str, Any]:
    return {
        "name": layer.name,
        "owner": layer.owner if several else "",
        "cells": layer.cells,
        "notes": ", ".join(layer.notes),
    }


def _flat(environment: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield name and value of each leaf, with nested names joined by dots."""
    for name, value in environment.items():
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value
