"""The template variables of the page of a run, and of one that compares two runs."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ampwise.finding import Rule
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.comparison_text import TITLES, how_often, sentence
from ampwise.report.formatting import evidence_line, format_percent, format_short, format_time
from ampwise.report.layers import LayerGradients, describe_layers, layers_headings, layers_title
from ampwise.report.page.charts import shown_layers
from ampwise.report.run_facts import (
    ACTIVATION_HEADINGS,
    ACTIVATIONS,
    activations_of,
    count_output_dtypes,
    device_time_by_kind,
    dtype_flow_of,
    environment,
    headline_numbers_of,
    largest_matmuls,
    memory,
    sentences,
    settings,
    timing,
    waiting_lines,
    work_by_precision,
)
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import latest_events, occurrence, opening, run_mood, verdict, worst_first
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

__all__ = ["FindingCard", "comparison_view", "finding_card", "rules_of", "run_view"]

MOST_FINDINGS = 300
MOST_EVENTS = 300
MOST_MODULES = 12
MOST_MODULES_RUN = 1000
MOST_COMPARED = 100  # findings of each kind
MOST_CHANGED_LAYERS = 40
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
    times = [format_time(str(run.manifest[part])) for part in ("created", "finished") if run.manifest.get(part)]
    when = f"From {' to '.join(times)}." if len(times) == 2 else f"Started {times[0]}." if times else ""
    flow = dtype_flow_of(run)
    modules = activations_of(run)
    return {
        "title": verdict(run),
        "mood": run_mood(run),
        "opening": opening(run),
        "when": when,
        "command": _command(run),
        "numbers": headline_numbers_of(run),
        "cards": cards[:MOST_FINDINGS],
        "cards_left": len(cards) - MOST_FINDINGS,
        "events": events,
        "events_left": earlier_events,
        "settings": [(f"{one.name}={format_short(one.value)}", one.reason) for one in settings(run)],
        "layers": _layers(layers),
        "modules": {
            "rows": [one.cells for one in modules[:MOST_MODULES]],
            "headings": ACTIVATION_HEADINGS,
            "about": ACTIVATIONS,
        },
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
    finding, place = counted.finding, counted.finding.place
    if place.file is not None:
        place = place.but(file=place.file.removeprefix(f"{run.environment.get('folder')}/"))
    lines, more = recorded_lines(counted), recorded_lines(counted, MORE_CONTEXT)
    changed = difflib.unified_diff(finding.rule.bad.splitlines(), finding.rule.good.splitlines(), lineterm="", n=100)
    return FindingCard(
        id=name,
        counted=counted,
        place=str(place) if place.as_dict() else "",
        details=[text for text in (evidence_line(finding.shown_evidence), occurrence(counted)) if text],
        lines=_drawn(lines),
        more_lines=_drawn(more) if len(more) > len(lines) else {},
        diff=counted.diff,
        example=""
        if counted.diff
        else "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@"))),
    )


def _drawn(lines: Mapping[int, str]) -> dict[int, str]:
    return {number: line.expandtabs(4)[:LONGEST_LINE] for number, line in lines.items()}


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
    rows = [
        {
            "name": layer.name,
            "owner": layer.owner if several else "",
            "cells": layer.cells,
            "notes": ", ".join(layer.notes),
        }
        for layer in shown_layers(layers)
    ]
    return {
        "rows": rows,
        "title": layers_title(layers),
        "about": describe_layers(layers),
        "headings": layers_headings(layers),
        "left": len(layers) - len(rows),
    }


def _flat(environment: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each leaf, with nested names joined by dots."""
    for name, value in environment.items():
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value


# --- two runs ------------------------------------------------------------------------------------------------------


def comparison_view(before: Run, after: Run) -> dict[str, Any]:
    """Return the variables of comparison.html."""
    compared = Comparison.of(before, after)
    groups: list[dict[str, Any]] = []
    for status, (title, _) in TITLES.items():
        found = [one for one in compared.findings if one.status == status]
        cards = []
        for number, one in enumerate(found[:MOST_COMPARED], 1):
            own = before if one.after is None else after  # paths are relative to its own run's folder
            cards.append((finding_card(one.seen, own, f"{status}-{number}"), how_often(one)))
        if cards:
            left = len(found) - MOST_COMPARED
            groups.append({"title": f"{title} ({len(found):,})", "status": status, "cards": cards, "left": left})
    numbers = [
        {
            "name": one.name,
            "meaning": one.meaning,
            "before": one.written(one.before),
            "after": one.written(one.after),
            "change": one.change,
            "judged": one.judged if one.judged in ("better", "worse") else "",
        }
        for one in compared.numbers
    ]
    changed = [layer for layer in compared.layers if layer.changed]
    layers = []
    for layer in changed[:MOST_CHANGED_LAYERS]:
        lost = ["" if share is None else format_percent(share) for share in (layer.lost_before, layer.lost_after)]
        layers.append([layer.name, *lost, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}"])
    only = (("before", compared.only_before), ("after", compared.only_after))
    return {
        "title": sentence(compared.verdict),
        "mood": compared.mood,
        "names": [("before", compared.before), ("after", compared.after)],
        "notes": compared.notes,
        "caution": compared.caution,
        "numbers": numbers,
        "groups": groups,
        "rules": rules_of(card for group in groups for card, _ in group["cards"]),
        "setup": [(one.what, one.before or "unknown", one.after or "unknown") for one in compared.setup],
        "layers": layers,
        "layers_left": len(changed) - MOST_CHANGED_LAYERS,
        "only": [(which, names) for which, names in only if names],
    }
