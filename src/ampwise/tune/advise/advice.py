"""The answer: a precision and all that goes with it, each number with what it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ampwise.finding import Finding
from ampwise.rules.evidence.choice.advice import advises_against
from ampwise.rules.evidence.choice.choice import PrecisionChoice
from ampwise.rules.evidence.choice.gain import ExpectedGain

__all__ = [
    "DATASHEET",
    "DERIVED",
    "MEASURED_BY_USER",
    "MEASURED_ELSEWHERE",
    "READ_HERE",
    "RULE",
    "Advice",
    "AdviceReason",
    "Compile",
    "KeptPart",
    "LossScale",
    "Switch",
    "TriageStep",
]

# What a statement rests on.
READ_HERE = "read here"  # what this machine says of itself
MEASURED_BY_USER = "measured by you"
MEASURED_ELSEWHERE = "measured on one H200"
DERIVED = "derived"
DATASHEET = "datasheet"
RULE = "rule"  # a fact about formats or about torch, which the rules' pages explain


@dataclass(frozen=True, slots=True)
class AdviceReason:
    """Why, and what that rests on."""

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


@dataclass(frozen=True, slots=True)
class Switch:
    """What to set for FP32 products; no lines where there is nothing to set."""

    lines: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Compile:
    """Whether to use torch.compile; None where nothing is known."""

    yes: bool | None
    why: str


@dataclass(frozen=True, slots=True)
class TriageStep:
    """One thing to do about a symptom: a command where there is one, and what it tells."""

    command: str | None
    tells: str


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
        return any(advises_against(finding) for finding in self.findings)

    def __str__(self) -> str:
        from ampwise.tune.advise.text import as_text

        return as_text(self).rstrip("\n")

    def __repr__(self) -> str:
        against = "".join(
            f", {'no' if advises_against(each) else 'careful'}: {each.rule.code}" for each in self.findings
        )
        return f"<Advice: {self.precision} on {self.choice.target.name}{against}>"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; unknown values are None."""
        return {
            "precision": self.precision,
            "refused": self.refused,
            "asked": _asked(self.choice),
            "why": [asdict(reason) for reason in self.reasons],
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "keep_fp32": [asdict(kept) for kept in self.kept],
            "tf32": asdict(self.tf32),
            "compile": asdict(self.compile),
            "speedup": None if self.speedup is None else _gain(self.speedup),
            "speedup_why": self.speedup_why,
            "triage": [asdict(step) for step in self.triage],
            "changes": list(self.changes),
            "findings": [finding.as_dict() for finding in self.findings],
            "code": {"torch": self.by_hand, "ampwise": self.with_engine},
        }


def _asked(choice: PrecisionChoice) -> dict[str, Any]:
    target, model = choice.target, choice.model
    return {
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
        "model": asdict(model),
    }


def _gain(gain: ExpectedGain) -> dict[str, Any]:
    return asdict(gain) | {"basis": MEASURED_ELSEWHERE if gain.measured else DERIVED}
