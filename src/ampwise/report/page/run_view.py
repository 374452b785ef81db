"""The template variables of the page of a run, and of one that compares two runs."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from ampwise.finding import Place, Rule, Severity
from ampwise.report.comparison.comparison import Comparison
from ampwise.report.comparison.comparison_text import TITLES, how_often, sentence
from ampwise.report.comparison.numbers import UNCLEAR
from ampwise.report.formatting import evidence_line, format_percent, format_short, format_time
from ampwise.report.impact import impact_of
from ampwise.report.layers import LayerGradients, describe_layers, layers_headings
from ampwise.report.page.charts import shown_layers
from ampwise.report.page.syntax import coloured, coloured_lines
from ampwise.report.page.templates import plain
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
    steps_of,
    timing,
    waiting_lines,
    work_by_precision,
)
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import ending, latest_events, occurrence, opening, run_mood, setup_of, worst_first
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

MOST_FINDINGS = 300
MOST_EVENTS = 300
MOST_MODULES = 12
MOST_MODULES_RUN = 1000
MOST_MARKERS = 20
MOST_COMPARED = 100  # findings of each kind
MOST_CHANGED_LAYERS = 40
MORE_CONTEXT = 8  # lines around a finding in the folded part
LOST, SUBNORMAL = 0.001, 0.01  # shares of a layer's gradients from which it is shown as wrong
FIX_COMMAND = "ampwise check --fix "
SCRIPTS = (".py", ".ipynb")
SECTIONS = {  # titles, by the id of a section
    "findings": "Findings",
    "events": "Events",
    "settings": "Suggested settings",
    "curves": "Curves",
    "gradients": "Gradients by layer",
    "modules": "Activations",
    "time": "Time",
    "memory": "Memory",
    "flow": "Precision",
    "notes": "Checked",
    "rules": "Rules",
}
STATUS_WORDS = {"new": "new", "open": "unknown", "still": "still there", "gone": "gone"}  # of findings of two runs
ENVIRONMENT = ("environment", "Environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """A line of code in a card: its number, "+" or "-" in a diff, and its text with syntax colours."""

    number: int | None
    sign: str
    text: str  # markup
    is_place: bool = False  # the line of the finding

    @property
    def style(self) -> str:
        return "here" if self.is_place else {"+": "added", "-": "removed", "…": "gap"}.get(self.sign, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingCard:
    """A finding with everything that its card shows."""

    id: str
    counted: CountedFinding
    title: str
    impact: str  # what it cost, in a few words; empty if unknown
    place: str  # "train.py:31", with the file relative to the run's folder
    what: str  # the parameter, module or device
    editor: str  # address that opens the place in an editor; empty if the file is not known
    often: str
    evidence: str
    lines: list[CodeLine]  # the diff that fixes it if there is one, else the code around its place
    more_lines: list[CodeLine]
    command: str  # that fixes it; empty if there is no safe fix
    is_diff: bool
    example: list[CodeLine]  # the rule's example as a diff, if the finding has no diff
    consequences: list[str]

    @property
    def rule(self) -> Rule:
        return self.counted.finding.rule


def run_view(run: Run, layers: Sequence[LayerGradients]) -> dict[str, Any]:
    """Return the variables of page.html."""
    findings = worst_first(run.merged_findings())
    cards = [run_card(one, run, f"finding-{number}") for number, one in enumerate(findings[:MOST_FINDINGS], 1)]
    events, earlier_events = latest_events(run, MOST_EVENTS)
    flow = dtype_flow_of(run)
    modules = activations_of(run)
    headline, leads = _headline(run, cards)
    view = {
        "headline": headline,
        "leads": leads,
        "title": f"{plain(headline)} · {script_name(run)}",
        "mood": run_mood(run),
        "chips": severity_chips(cards),
        "about": _about(run),
        "when": _when(run),
        "command": _command(run),
        "fix": _fix_all(cards),
        "numbers": headline_numbers_of(run),
        "cards": cards,
        "cards_left": len(findings) - MOST_FINDINGS,
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
        "timing": [(name, value) for name, value in timing(run) if value not in ("0", "0.0%")],
        "kinds": device_time_by_kind(run),
        "precisions": work_by_precision(run),
        "products": largest_matmuls(run),
        "waiting": [(line.removeprefix(f"{run.environment.get('folder')}/"), how) for line, how in waiting_lines(run)],
        "memory": memory(run),
        "flow": flow[:MOST_MODULES_RUN],
        "flow_left": len(flow) - MOST_MODULES_RUN,
        "flow_about": count_output_dtypes(flow),
        "fine": sentences(run, "what_was_fine"),
        "not_measured": sentences(run, "not_measured"),
        "trouble": run.trouble,
        "rules": rules_of(cards),
        "environment": [(name, format_short(value)) for name, value in _flat(environment(run))],
        "folder": str(run.folder),
        "state": live_state(run),
    }
    present = {
        "findings": cards,
        "events": events,
        "settings": view["settings"],
        "curves": run.steps,
        "gradients": layers,
        "modules": modules,
        "time": view["timing"] or view["kinds"],
        "memory": view["memory"],
        "flow": flow,
        "notes": view["fine"] or view["not_measured"] or run.trouble,
        "rules": view["rules"],
    }
    return view | {"nav": [(name, SECTIONS[name]) for name, found in present.items() if found] + [ENVIRONMENT]}


def severity_chips(cards: Sequence[FindingCard]) -> list[tuple[str, str, str]]:
    """Return a chip for each severity among the cards, worst first: severity, "2 errors", and the first card's id."""
    chips = []
    for severity in Severity:
        own = [card for card in cards if card.rule.severity is severity]
        if own:
            chips.append((str(severity), f"{len(own):,} {severity.word}{'' if len(own) == 1 else 's'}", own[0].id))
    return chips


def markers(cards: Sequence[FindingCard]) -> list[dict[str, Any]]:
    """Return where findings first occurred, for the charts: the step, and the number and severity of the card."""
    return [
        {
            "step": card.counted.first_step,
            "number": number,
            "severity": str(card.rule.severity),
            "name": card.rule.name,
            "id": card.id,
        }
        for number, card in enumerate(cards[:MOST_MARKERS], 1)
        if card.counted.first_step is not None
    ]


def live_state(run: Run) -> dict[str, str]:
    """Return the mark of a live page: "live" or "ended", and how it ended in a word."""
    ended = not run.status.startswith("running") or run.alive is False
    word = "killed" if run.status.startswith("running") else run.status
    if word == "finished" and run.manifest.get("exit_code"):
        word = f"exit code {run.manifest['exit_code']}"
    return {"name": "ended", "words": f"ended: {word}"} if ended else {"name": "live", "words": "live"}


def script_name(run: Run) -> str:
    return PurePath(str(run.manifest.get("script") or "ampwise")).name


def _headline(run: Run, cards: Sequence[FindingCard]) -> tuple[str, list[str]]:
    """Return the most important thing to know as a title, and the sentences below it."""
    how, first = ending(run), next(iter(cards), None)
    if first is None or (run_mood(run) == Severity.ERROR and first.rule.severity is not Severity.ERROR):
        opened = opening(run)
        if run_mood(run) == "ok" and steps_of(run):
            return "No findings", [how] if how else []
        return opened[0].removesuffix("."), opened[1:]
    title = first.title
    if first.rule.names_the_cause:
        at = "" if first.counted.first_step is None else f"Step {first.counted.first_step:,}: "
        title = f"{at}{first.counted.finding.message}"
    unread = "" if run.findings_known else "There are more findings, which could not be read."
    return title, [text for text in (how, unread) if text]


def _about(run: Run) -> list[str]:
    """Return what ran, in a few words each: script, steps, precision, ranks."""
    steps = steps_of(run)
    setup = setup_of(run).strip(" ()")
    return [
        str(run.manifest.get("script") or "unknown script"),
        f"{steps:,} step{'' if steps == 1 else 's'}" if steps else "no step taken",
        *(setup.split(", ") if setup else []),
    ]


def _when(run: Run) -> str:
    times = [format_time(str(run.manifest[part])) for part in ("created", "finished") if run.manifest.get(part)]
    return f"From {' to '.join(times)}." if len(times) == 2 else f"Started {times[0]}." if times else ""


def _fix_all(cards: Sequence[FindingCard]) -> dict[str, Any] | None:
    """Return the command that fixes what can be fixed safely, and how many of the findings that are."""
    commands = dict.fromkeys(card.command for card in cards if card.command)
    if not commands:
        return None
    files = [command.removeprefix(FIX_COMMAND) for command in commands]
    fixed = sum(bool(card.command) for card in cards)
    has = "has" if fixed == 1 else "have"
    what = f"{fixed:,} of {len(cards):,} findings {has} a safe fix" if len(cards) > 1 else "This finding has a safe fix"
    return {"command": f"{FIX_COMMAND}{' '.join(files)}", "what": what}


def rules_of(found: Iterable[FindingCard]) -> list[Rule]:
    """Return the rules that the cards link to, each once, by code."""
    rules = {card.rule.code: card.rule for card in found}
    return [rules[code] for code in sorted(rules)]


def run_card(counted: CountedFinding, run: Run, name: str) -> FindingCard:
    """Return the card of a finding of a run. name: the id of its element in the page."""
    folder = run.environment.get("folder")
    impact, often = impact_of(counted, run), occurrence(counted)
    if counted.finding.rule.name == "clip-scaled-grads" and impact:
        counted = replace(counted, finding=counted.finding.but(evidence={}))  # the impact says it
    return finding_card(counted, name, folder=str(folder) if folder else "", impact=impact, often=often)


def finding_card(
    counted: CountedFinding, name: str, *, folder: str = "", impact: str = "", often: str = ""
) -> FindingCard:
    """Return the card of a finding. folder: the one that paths are shown relative to."""
    finding, place = counted.finding, counted.finding.place
    if place.file is not None:
        place = place.but(file=place.file.removeprefix(f"{folder}/"))
    more = _excerpt_lines(recorded_lines(counted, MORE_CONTEXT), place.line)
    lines = _diff_lines(counted.diff, place.line) if counted.diff else []
    command = ""
    if counted.diff and counted.diff_is_safe and place.file and place.file.endswith(SCRIPTS):
        command = f"{FIX_COMMAND}{shlex.quote(place.file)}"
    changed = difflib.unified_diff(finding.rule.bad.splitlines(), finding.rule.good.splitlines(), lineterm="", n=100)
    excerpt = lines or _excerpt_lines(recorded_lines(counted), place.line)
    explained = [each.finding for each in counted.consequences]
    return FindingCard(
        id=name,
        counted=counted,
        title=finding.rule.summary.strip().removesuffix("."),
        impact=impact,
        place=""
        if place.file is None
        else str(place.but(parameter=None, module=None, device=None, step=None, rank=None)),
        what=" ".join(part for part in (place.parameter or place.module, place.device) if part),
        editor=_editor_address(finding.place, folder),
        often=often,
        evidence=evidence_line(finding.shown_evidence),
        lines=excerpt,
        more_lines=more if len(more) > len(excerpt) or lines else [],
        command=command,
        is_diff=bool(lines),
        example=[] if lines else _diff_lines("\n".join(changed), None),
        consequences=[f"{one.rule.code} {one.rule.name}: {one.message.partition(': ')[0]}" for one in explained],
    )


def _excerpt_lines(lines: Mapping[int, str], here: int | None) -> list[CodeLine]:
    """Return lines of code, without blank ones at both ends."""
    shown = [
        CodeLine(number=number, sign="", text=text, is_place=number == here)
        for number, text in coloured_lines(lines).items()
    ]
    while shown and not shown[-1].text.strip() and not shown[-1].is_place:
        shown.pop()
    while shown and not shown[0].text.strip() and not shown[0].is_place:
        shown.pop(0)
    return shown


def _diff_lines(diff: str, here: int | None) -> list[CodeLine]:
    """Return the lines of a unified diff, numbered as before the change, without its headers."""
    found: list[CodeLine] = []
    number = 0
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    texts = coloured(["" if line.startswith("@@") else line[1:] for line in lines])
    for line, text in zip(lines, texts, strict=True):
        if line.startswith("@@"):
            start = re.match(r"@@ -(\d{1,9})", line)
            number = int(start[1]) if start else 0
            found += [CodeLine(number=None, sign="…", text="")] if found else []
            continue
        sign = line[:1] if line[:1] in ("+", "-") else ""
        known = number if number and sign != "+" else None
        found.append(CodeLine(number=known, sign=sign, text=text, is_place=known is not None and known == here))
        number += bool(number and sign != "+")
    return found


def _editor_address(place: Place, folder: str) -> str:
    """Return the address that opens the place in VS Code and its relatives; empty for a path that is not absolute."""
    if place.file is None or not place.file.endswith(SCRIPTS) or place.cell is not None:
        return ""
    path = place.file if not folder else str(PurePath(folder, place.file))
    if not (PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()):
        return ""
    where = "".join(f":{part}" for part in (place.line, place.column) if part is not None)
    return f"vscode://file/{quote(path.replace(chr(92), '/').lstrip('/'), safe='/:')}{where}"


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
    """Return the rows of the table of layers: those with something wrong, and the others, which are folded."""
    if not layers:
        return {"wrong": [], "right": [], "about": "", "headings": [], "left": 0, "summary": ""}
    several = len({layer.optimizer for layer in layers}) > 1
    wrong: list[dict[str, Any]] = []
    right: list[dict[str, Any]] = []
    for place, layer in enumerate(shown_layers(layers)):
        row = {
            "place": place,
            "name": layer.name,
            "owner": layer.owner if several else "",
            "cells": layer.cells,
            "notes": ", ".join(layer.notes),
        }
        is_wrong = layer.notes or (layer.lost or 0.0) >= LOST or (layer.subnormal or 0.0) >= SUBNORMAL
        (wrong if is_wrong else right).append(row)
    number = f"{len(right):,}{' other' if wrong else ''} layer{'' if len(right) == 1 else 's'}"
    its = "its" if len(right) == 1 else "their"
    fine = "nothing wrong" if layers[0].underflow is None else f"FP16 holds {its} gradients"
    return {
        "wrong": wrong,
        "right": right,
        "about": describe_layers(layers),
        "headings": layers_headings(layers),
        "left": len(layers) - len(wrong) - len(right),
        "summary": f"{number}: {fine}",
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
        for place, one in enumerate(found[:MOST_COMPARED], 1):
            own = before if one.after is None else after  # paths are relative to its own run's folder
            cards.append(replace(run_card(one.seen, own, f"{status}-{place}"), often=how_often(one)))
        if cards:
            groups.append(
                {
                    "title": title,
                    "count": f"{len(found):,}",
                    "status": status,
                    "cards": cards,
                    "left": len(found) - MOST_COMPARED,
                }
            )
    changed_numbers: list[dict[str, str]] = []
    other_numbers: list[dict[str, str]] = []
    for number in compared.numbers:
        row = {
            "name": number.name,
            "meaning": number.meaning,
            "before": number.written(number.before),
            "after": number.written(number.after),
            "change": number.change,
            "judged": number.judged if number.judged in ("better", "worse") else "",
        }
        (other_numbers if number.change in ("", "same", UNCLEAR) else changed_numbers).append(row)
    changed = [layer for layer in compared.layers if layer.changed]
    layers = []
    for layer in changed[:MOST_CHANGED_LAYERS]:
        lost = ["" if share is None else format_percent(share) for share in (layer.lost_before, layer.lost_after)]
        layers.append([layer.name, *lost, f"{layer.norm_before:.3g}", f"{layer.norm_after:.3g}"])
    only = (("before", compared.only_before), ("after", compared.only_after))
    headline = _comparison_headline(compared)
    titles = {group["status"]: (group["title"], group["cards"]) for group in groups}
    sections = {
        **{status: titles[status] for status in ("new", "open") if status in titles},
        "numbers": ("Numbers", compared.numbers),
        "setup": ("Setup", compared.setup),
        "curves": ("Curves", before.steps or after.steps),
        **{status: titles[status] for status in ("still", "gone") if status in titles},
        "layers": ("Layers", layers or any(names for _, names in only)),
        "rules": ("Rules", groups),
    }
    moods = {"new": compared.mood, "open": "warning", "still": "", "gone": "ok"}
    return {
        "headline": headline,
        "title": f"{plain(headline)} · {compared.before} → {compared.after}",
        "loss": _compared_loss(compared),
        "mood": compared.mood,
        "chips": [
            (moods[group["status"]], f"{group['count']} {STATUS_WORDS[group['status']]}", group["status"])
            for group in groups
        ],
        "nav": [(name, title) for name, (title, found) in sections.items() if found],
        "names": [("before", compared.before), ("after", compared.after)],
        "notes": compared.notes,
        "caution": compared.caution,
        "numbers": changed_numbers,
        "other_numbers": other_numbers,
        "groups": groups,
        "rules": rules_of(card for group in groups for card in group["cards"]),
        "setup": [(one.what, one.before or "unknown", one.after or "unknown") for one in compared.setup],
        "layers": layers,
        "layers_left": len(changed) - MOST_CHANGED_LAYERS,
        "only": [(which, names) for which, names in only if names],
    }


def _compared_loss(compared: Comparison) -> str:
    """Return the losses of both runs in a sentence; empty if they cannot be compared."""
    loss = next((one for one in compared.numbers if one.key == "loss_at_end"), None)
    if loss is None or loss.before is None or loss.after is None or not compared.alike:
        return ""
    judged = f": {loss.judged}" if loss.judged else ""
    return (
        f"Loss after {compared.shared_steps:,} step{'' if compared.shared_steps == 1 else 's'}: "
        f"{loss.written(loss.before)} before, {loss.written(loss.after)} now{judged}."
    )


def _comparison_headline(compared: Comparison) -> str:
    """Return the most important change as a title; the whole verdict where no finding can be called new or gone."""
    new, gone, still = len(compared.new), len(compared.gone), len(compared.still)
    if compared.one_record or not all(compared.findings_known):
        return sentence(compared.verdict).removesuffix(".")
    if compared.endings[1]:
        return f"The later run {compared.endings[1]}"
    if new:
        summary = compared.new[0].seen.finding.rule.summary.strip().removesuffix(".")
        return f"{new:,} new finding{'' if new == 1 else 's'}: {summary}"
    if gone:
        noun = f"finding{'' if gone + still == 1 else 's'}"
        which = (
            f"{gone:,} of {gone + still:,} {noun}" if still else f"All {gone:,} {noun}" if gone > 1 else "The finding"
        )
        return f"{which} {'is' if gone == 1 else 'are'} gone"
    return (
        f"The same {still:,} finding{'' if still == 1 else 's'} in both runs" if still else "No findings in either run"
    )
