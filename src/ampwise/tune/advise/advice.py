"""The answer: a precision and all that goes with it, each number with what it rests on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ampwise.finding import Finding
from ampwise.finding.terminal import paint, printable, shortened
from ampwise.tune.advise.choice import ExpectedGain, PrecisionChoice
from ampwise.tune.advise.symptoms import SYMPTOMS, TriageStep

WIDTH = 110
LABEL = 10  # columns, before the text of a section
NAMES = {"auto": "BF16 where the device has tensor cores for it, else FP16"}
SCALES = {"fp16": " with a dynamic loss scale", "bf16": " without a loss scale", "auto": " with a loss scale"}


class AdviceReason(NamedTuple):
    """Why, and what that rests on.

    ``basis`` is "read here" (what this machine says of itself), "measured by you", "measured on one H200", "derived",
    "datasheet", or "rule" (a fact about formats or about torch, which the rules' pages explain).
    """

    text: str
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How the loss is scaled in FP16: torch's own settings, which find the scale by themselves."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    why: str = (
        "starts at 65536, halves when gradients overflow, doubles after 2000 clean steps; torch's has neither floor "
        "nor ceiling, ampwise.GradScaler has a floor"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """What stays in FP32: by itself, or by ``patterns`` of a policy, or by what ``how`` says."""

    what: str
    why: str
    how: str = ""
    by_itself: bool = False
    patterns: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


class Switch(NamedTuple):
    """What to set for FP32 matmuls; no lines where there is nothing to set."""

    lines: tuple[str, ...]
    why: str


class Compile(NamedTuple):
    """Whether to use torch.compile; None where nothing is known."""

    yes: bool | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Advice:
    """The recommended precision, and why. ``print`` shows it; ``as_dict`` returns everything.

    ``findings`` are objections to what was planned or proposed; ``refused`` says whether any of them is a no.
    """

    choice: PrecisionChoice
    precision: str  # "fp32", "tf32", "fp16", "bf16", "fp8"; "auto" where the device is not known
    reasons: tuple[AdviceReason, ...]
    loss_scale: LossScale | None
    kept: tuple[KeptPart, ...]
    tf32: Switch
    compile: Compile
    speedup: ExpectedGain | None
    speedup_why: str
    triage: tuple[TriageStep, ...]
    changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    by_hand: str  # code with torch.amp
    with_engine: str  # code with ampwise.Engine

    @property
    def refused(self) -> bool:
        """Whether something that was planned or proposed got a no."""
        return any(finding.evidence["answer"] == "no" for finding in self.findings)

    def __str__(self) -> str:
        return as_text(self).rstrip("\n")

    def __repr__(self) -> str:
        against = "".join(f", {finding.evidence['answer']}: {finding.rule.code}" for finding in self.findings)
        return shortened(f"<Advice: {self.precision} on {self.choice.target.name}{against}>")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; unknown values are None."""
        choice, target, gain = self.choice, self.choice.target, self.speedup
        return {
            "precision": self.precision,
            "refused": self.refused,
            "asked": {
                "device": target.name if target.known else None,
                "device_id": None if target.gpu is None else target.gpu.id,
                "device_type": target.kind,
                "capability": target.capability_text or None,
                "tensor_cores": list(target.formats) if target.known else None,
                "here": target.here,
                "remark": target.remark or None,
                "want": choice.want,
                "scaling": None if choice.scaling is None else asdict(choice.scaling),
                "ideas": list(choice.ideas),
                "symptom": choice.symptom,
                "measured": choice.measured,
                "model": asdict(choice.model),
            },
            "why": [reason._asdict() for reason in self.reasons],
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "keep_fp32": [asdict(kept) for kept in self.kept],
            "tf32": self.tf32._asdict(),
            "compile": self.compile._asdict(),
            "speedup": gain and asdict(gain) | {"basis": "measured on one H200" if gain.measured else "derived"},
            "speedup_why": self.speedup_why,
            "triage": [step._asdict() for step in self.triage],
            "changes": list(self.changes),
            "findings": [finding.as_dict() for finding in self.findings],
            "code": {"torch": self.by_hand, "ampwise": self.with_engine},
        }


def as_text(advice: Advice, *, width: int = WIDTH, colour: bool = False) -> str:
    """Return the answer in two lines, then why, then the code, which alone may be wider than ``width``."""
    lines: list[str] = []

    def wrap(text: str, style: str) -> None:
        lines.extend(paint(line, style, colour) for line in _wrapped(text, width))

    def section(label: str, texts: Iterable[str], style: str = "dim", column: int = LABEL) -> None:
        for text in texts:
            first, *more = _wrapped(text, width, label.ljust(column))
            lines.extend([paint(label, style, colour) + first[len(label) :], *more])
            label = ""

    def code(title: str, text: str) -> None:
        lines.extend(["", paint(f"# {title}", "dim", colour), *map(printable, text.rstrip("\n").split("\n"))])

    target, gain = advice.choice.target, advice.speedup
    refusal = next((finding for finding in advice.findings if finding.evidence["answer"] == "no"), None)
    if refusal is not None:
        wrap(f"NO: {refusal.message}.", "error")
    name = NAMES.get(advice.precision, advice.precision.upper()) + SCALES.get(advice.precision, "")
    where = f" on {target.name}" if target.known else ""
    wrap(f"Train {advice.choice.model.title} in {name}{where}.", "bold")
    if advice.triage:
        wrap(f"First ({SYMPTOMS[advice.choice.symptom or '']}):", "bold")
    for number, step in enumerate(advice.triage, 1):
        section(f"  {number}.", [f"{step.command}  → {step.tells}" if step.command else step.tells], column=5)
    for finding in advice.findings:
        evidence, know = finding.evidence, finding.evidence["to_know"]
        title = f"{finding.rule.code} {finding.rule.name}" + ("" if finding is refusal else f": {finding.message}.")
        lines.append("")
        section(evidence["answer"], [title], "error" if evidence["answer"] == "no" else "warning")
        section("", [f"- {option}: {cost}" for option, cost in evidence["costs"].items()])
        section("instead", [finding.fix])
        section("to know", [f"{know['command']}  → {know['tells']}"])
    lines.append("")
    section("why", [f"{reason.text} [{reason.basis}]" for reason in advice.reasons])
    faster = None if gain is None else f"{gain.text} {gain.over.upper()} [{advice.speedup_why}]"
    section("speed-up", [faster or advice.speedup_why])
    section("scale", ["none" if advice.loss_scale is None else f"dynamic: {advice.loss_scale.why}"])
    section("in FP32", [f"{kept.what} ({kept.how or 'by itself'}): {kept.why}" for kept in advice.kept])
    section("TF32", [": ".join(filter(None, ["; ".join(advice.tf32.lines), advice.tf32.why]))])
    answer = {True: "yes", False: "no", None: "unknown"}[advice.compile.yes]
    section("compile", [f"{answer}: {advice.compile.why}"])
    section("changes", advice.changes)
    if advice.triage:  # whoever is in trouble wants a short page
        code("with ampwise; with torch.amp: code.torch of --json", advice.with_engine)
    else:
        code("with torch.amp", advice.by_hand)
        code("with ampwise", advice.with_engine)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int, left: str = "") -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=left,
        subsequent_indent=" " * (len(left) + (2 if text.startswith("- ") else 0)),
        break_long_words=False,
        break_on_hyphens=False,
    )
