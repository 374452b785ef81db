"""What the page of a run shows, as its template asks for it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ampwise.finding import Place, Rule
from ampwise.report.activations import ABOUT, HEADINGS, MOST_MODULES, activations_of
from ampwise.report.facts import environment, sentences, settings, timing
from ampwise.report.flow import about_flow, flow_of
from ampwise.report.layers import about_layers, headings, title
from ampwise.report.numbers import numbers_of
from ampwise.report.page.payload import shown_layers
from ampwise.report.source_lines import kept_lines
from ampwise.report.usage import kinds_of_time, memory, precisions_of_work, products, waiting_lines
from ampwise.report.verdict import happened, mood, opening, verdict, worst_first
from ampwise.report.wording import moment, one_line, short

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen
    from ampwise.report.layers import Layer

__all__ = ["Card", "card", "rules_of", "view"]

MOST_FINDINGS = 300
MOST_MODULES_RUN = 1000
FARTHER = 8  # lines around a finding for whoever wants more of them
LONGEST_LINE = 400  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A finding, ready to be shown."""

    id: str
    seen: Seen
    place: str  # its file as seen from where the script ran
    told: list[str]
    lines: dict[int, str]
    more_lines: dict[int, str]
    diff: str
    example: str  # as a diff, where this one has none of its own

    @property
    def rule(self) -> Rule:
        return self.seen.finding.rule


def view(run: Run, layers: Sequence[Layer]) -> dict[str, Any]:
    """The variables of page.html."""
    seen = worst_first(run.merged_findings())
    found = [card(one, run, f"finding-{number}") for number, one in enumerate(seen, 1)]
    flow = flow_of(run)
    modules = activations_of(run)
    return {
        "title": verdict(run),
        "mood": mood(run),
        "opening": opening(run),
        "when": _when(run),
        "command": _command(run),
        "numbers": numbers_of(run),
        "cards": found[:MOST_FINDINGS],
        "cards_left": len(found) - MOST_FINDINGS,
        "settings": [(f"{one.name}={short(one.value)}", one.reason) for one in settings(run)],
        "layers": _layers(layers),
        "modules": {"rows": [one.cells for one in modules[:MOST_MODULES]], "headings": HEADINGS, "about": ABOUT},
        "modules_left": len(modules) - MOST_MODULES,
        "timing": timing(run),
        "kinds": kinds_of_time(run),
        "precisions": precisions_of_work(run),
        "products": products(run),
        "waiting": waiting_lines(run),
        "memory": memory(run),
        "flow": flow[:MOST_MODULES_RUN],
        "flow_left": len(flow) - MOST_MODULES_RUN,
        "flow_about": about_flow(flow),
        "fine": sentences(run, "what_was_fine"),
        "not_measured": sentences(run, "not_measured"),
        "trouble": run.trouble,
        "rules": rules_of(found[:MOST_FINDINGS]),
        "environment": [(name, short(value)) for name, value in _flat(environment(run))],
        "folder": str(run.folder),
    }


def rules_of(found: Iterable[Card]) -> list[Rule]:
    """The rules that the cards link to, each once, in the order of their codes."""
    rules = {card.rule.code: card.rule for card in found}
    return [rules[code] for code in sorted(rules)]


def card(seen: Seen, run: Run, name: str) -> Card:
    """A finding of a run. name: of its place in the page."""
    finding = seen.finding
    lines, more = kept_lines(seen), kept_lines(seen, FARTHER)
    return Card(
        id=name,
        seen=seen,
        place=_place(finding.place, run),
        told=[text for text in (one_line(finding.shown_evidence), happened(seen)) if text],
        lines=_drawn(lines),
        more_lines=_drawn(more) if len(more) > len(lines) else {},
        diff=seen.diff,
        example="" if seen.diff else _example(finding.rule),
    )


def _place(place: Place, run: Run) -> str:
    if place.file is not None:
        place = place.but(file=place.file.removeprefix(f"{run.environment.get('folder')}/"))
    return str(place) if place.as_dict() else ""


def _drawn(lines: Mapping[int, str]) -> dict[int, str]:
    return {number: line.expandtabs(4)[:LONGEST_LINE] for number, line in lines.items()}


def _example(rule: Rule) -> str:
    """The rule's own example, mended."""
    changed = difflib.unified_diff(rule.bad.splitlines(), rule.good.splitlines(), lineterm="", n=100)
    return "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@")))


def _when(run: Run) -> str:
    times = [moment(str(run.manifest[part])) for part in ("created", "finished") if run.manifest.get(part)]
    return f"From {' to '.join(times)}." if len(times) == 2 else f"Begun {times[0]}." if times else ""


def _command(run: Run) -> str:
    """As one types it: which Python it was, the environment says."""
    command = run.manifest.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    if words[1:3] == ["-m", "ampwise"]:
        words = words[2:]
    elif [PurePath(word).name for word in words[1:2]] == ["ampwise"]:
        words = ["ampwise", *words[2:]]
    return shlex.join(words)


def _layers(layers: Sequence[Layer]) -> dict[str, Any]:
    if not layers:
        return {"rows": [], "title": "Layers", "about": "", "headings": [], "left": 0}
    several = len({layer.optimizer for layer in layers}) > 1
    shown = shown_layers(layers)
    return {
        "rows": [_layer(layer, several) for layer in shown],
        "title": title(layers),
        "about": about_layers(layers),
        "headings": headings(layers),
        "left": len(layers) - len(shown),
    }


def _layer(layer: Layer, several: bool) -> dict[str, Any]:
    return {
        "name": layer.name,
        "owner": layer.owner if several else "",
        "cells": layer.cells,
        "notes": ", ".join(layer.notes),
    }


def _flat(environment: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Name and value of each leaf, with the names on the way joined by dots."""
    for name, value in environment.items():
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value
