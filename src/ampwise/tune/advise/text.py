"""Advice as text: the answer in the first two lines, then why, then the code."""

from __future__ import annotations

import textwrap

from ampwise.finding import Finding
from ampwise.finding.terminal import paint, printable
from ampwise.rules.evidence.choice.advice import advises_against
from ampwise.rules.evidence.choice.ideas import SYMPTOMS
from ampwise.tune.advise.advice import Advice, KeptPart

__all__ = ["as_text"]

WIDTH = 110
LABEL = 10  # columns, before the text of a section
ELSEWHERE = "with torch.amp: code.torch of --json"
NAMES = {"auto": "BF16 where the device has tensor cores for it, else FP16"}


def as_text(advice: Advice, *, width: int = WIDTH, colour: bool = False) -> str:
    """All of it, in lines of at most so many columns; code is not wrapped."""
    lines = _Lines(width, colour)
    lines.head(advice)
    lines.triage(advice)
    for finding in advice.findings:
        lines.finding(finding, told=finding is _first_no(advice))
    lines.blank()
    lines.section("why", [f"{reason.text} [{reason.basis}]" for reason in advice.reasons])
    lines.section("speed-up", [_speed(advice)])
    lines.section("scale", [_scale(advice)])
    lines.section("in FP32", [_kept(kept) for kept in advice.kept])
    lines.section("TF32", [_tf32(advice)])
    lines.section("compile", [f"{_YES[advice.compile.yes]}: {advice.compile.why}"])
    lines.section("changes", list(advice.changes))
    if advice.triage:  # whoever is in trouble wants a short page
        lines.code(f"with ampwise; {ELSEWHERE}", advice.with_engine)
    else:
        lines.code("with torch.amp", advice.by_hand)
        lines.code("with ampwise", advice.with_engine)
    return str(lines)


def headline(advice: Advice) -> str:
    """What to do, in a line."""
    name = NAMES.get(advice.precision, advice.precision.upper())
    scale = {"fp16": " with a dynamic loss scale", "bf16": " without a loss scale", "auto": " with a loss scale"}
    where = f" on {advice.choice.target.name}" if advice.choice.target.known else ""
    return f"Train {advice.choice.model.title} in {name}{scale.get(advice.precision, '')}{where}."


_YES = {True: "yes", False: "no", None: "unknown"}


class _Lines:
    """Text as it grows."""

    def __init__(self, width: int, colour: bool) -> None:
        self._width, self._colour = width, colour
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def head(self, advice: Advice) -> None:
        """The answer."""
        first = _first_no(advice)
        if first is not None:
            self._wrapped(f"NO: {first.message}.", "", "error")
        self._wrapped(headline(advice), "", "bold")

    def triage(self, advice: Advice) -> None:
        """What to do first, where something goes wrong."""
        if advice.triage:
            self._wrapped(f"First ({SYMPTOMS[advice.choice.symptom or '']}):", "", "bold")
        for number, step in enumerate(advice.triage, 1):
            told = f"{step.command}  → {step.tells}" if step.command else step.tells
            self.section(f"  {number}.", [told], column=5)

    def finding(self, finding: Finding, *, told: bool) -> None:
        """What speaks against it: the costs, and how to know. The message is left out where it was told before."""
        self.blank()
        says = "no" if advises_against(finding) else "careful"
        title = f"{finding.rule.code} {finding.rule.name}" + ("" if told else f": {finding.message}.")
        self.section(says, [title], "error" if says == "no" else "warning")
        for way, cost in finding.evidence["costs"].items():
            self.section("", [f"- {way}: {cost}"])
        know = finding.evidence["to_know"]
        self.section("instead", [finding.fix])
        self.section("to know", [f"{know['command']}  → {know['tells']}"])

    def section(self, label: str, texts: list[str], style: str = "dim", column: int = LABEL) -> None:
        """Texts under a label at their left."""
        for number, text in enumerate(texts):
            left = label.ljust(column) if number == 0 else " " * column
            self._wrapped(text, left, "", label if number == 0 else "", style)

    def code(self, title: str, code: str) -> None:
        self.blank()
        self._lines.append(paint(f"# {title}", "dim", self._colour))
        self._lines += [printable(line) for line in code.rstrip("\n").split("\n")]

    def blank(self) -> None:
        self._lines.append("")

    def _wrapped(self, text: str, left: str, style: str, label: str = "", label_style: str = "dim") -> None:
        wrapped = textwrap.wrap(
            printable(text),
            self._width,
            initial_indent=left,
            subsequent_indent=" " * (len(left) + (2 if text.startswith("- ") else 0)),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if label and self._colour:
            wrapped[0] = paint(label, label_style, True) + wrapped[0][len(label) :]
        self._lines += [paint(line, style, self._colour) if style else line for line in wrapped]


def _first_no(advice: Advice) -> Finding | None:
    return next((finding for finding in advice.findings if advises_against(finding)), None)


def _speed(advice: Advice) -> str:
    if advice.speedup is None:
        return advice.speedup_why
    return f"{advice.speedup.text} {advice.speedup.over.upper()} [{advice.speedup_why}]"


def _scale(advice: Advice) -> str:
    return "none" if advice.loss_scale is None else f"dynamic: {advice.loss_scale.why}"


def _kept(kept: KeptPart) -> str:
    how = "by itself" if kept.by_itself else kept.how
    return f"{kept.what} ({how}): {kept.why}"


def _tf32(advice: Advice) -> str:
    code = "; ".join(advice.tf32.lines)
    return f"{code}: {advice.tf32.why}" if code else advice.tf32.why
