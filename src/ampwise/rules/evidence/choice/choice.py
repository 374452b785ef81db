"""A question about a precision and everything known about it; the rules in ``rules/choice`` examine it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampwise.errors import BadInput, UnknownName
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.rules.evidence.choice.gain import ExpectedGain, expected_gain
from ampwise.rules.evidence.choice.ideas import EXACT, IDEAS, SYMPTOMS
from ampwise.rules.evidence.choice.model import KINDS, ModelFacts
from ampwise.rules.evidence.choice.target import Target
from ampwise.rules.evidence.speed_verdict import SpeedVerdict, verdict_of

__all__ = ["HALVES", "NARROW", "WANTED", "LossScaling", "PrecisionChoice", "parse_scaling"]

WANTED = COMMON_FORMATS
HALVES = ("fp16", "bf16")
NARROW = ("fp8", "mxfp8", "mxfp4", "nvfp4")
SCALINGS = ("none", "dynamic", "manual")
USUAL_FACTOR = 1000.0  # the usual factor of a manual loss scale
EXAMPLE = "train:make"  # placeholder for the user's function that builds model, batch and loss


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How the loss is scaled: not at all, by a GradScaler, or by a fixed factor."""

    kind: str
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """A question about a precision. ``want`` and ``scaling`` are None if not specified."""

    target: Target
    model: ModelFacts = field(default_factory=ModelFacts)
    want: str | None = None
    scaling: LossScaling | None = None
    ideas: tuple[str, ...] = ()
    symptom: str | None = None
    measured: float | None = None  # the measured speedup of 16-bit over FP32, if any

    def __post_init__(self) -> None:
        _known("precision", self.want, WANTED, f"There are {', '.join(WANTED)}.")
        _known("symptom", self.symptom, SYMPTOMS, f"There are {', '.join(SYMPTOMS)}.")
        _known("kind of model", self.model.kind, KINDS, f"There are {', '.join(KINDS)}.")
        for idea in self.ideas:
            _known("idea", idea, IDEAS, "`ampwise advise --ideas` lists them.")
        if self.measured is not None and not (math.isfinite(self.measured) and 0 < self.measured <= 1000):
            raise BadInput(f"measured speedup {self.measured:g}: expected a number such as 1.8.")

    def proposes(self, *ideas: str) -> bool:
        """Return whether any of these ideas was proposed."""
        return any(idea in self.ideas for idea in ideas)

    @property
    def exact(self) -> bool:
        """Whether the work needs FP32 accuracy."""
        return self.proposes(*EXACT)

    @property
    def stays_wide(self) -> bool:
        """Whether 16-bit is ruled out: by the accuracy needed, or by a measurement that showed no gain."""
        for_memory = self.symptom == "memory"  # activations shrink, whatever the speedup
        no_gain = self.measured is not None and verdict_of(self.measured) is SpeedVerdict.STAY
        return self.exact or (no_gain and not for_memory)

    @property
    def half(self) -> str | None:
        """The 16-bit format in question: the requested one, else the one the device has tensor cores for.

        None if there are tensor cores for neither, or 16-bit is ruled out.
        """
        if self.stays_wide:
            return None
        wanted = self.want if self.want in HALVES else None
        return wanted if wanted is not None and self.target.has(wanted) is not False else self.target.half

    def gain(self, precision: str) -> ExpectedGain | None:
        """Return the expected gain over FP32."""
        return expected_gain(self.target, self.model, precision)

    @property
    def subject(self) -> str:
        """The function named in suggested commands: the user's own, or a placeholder."""
        return self.model.name if self.model.name and ":" in self.model.name else EXAMPLE

    @property
    def elsewhere(self) -> str:
        """The ``--gpu`` option for commands that estimate for a device that is not in this machine."""
        return f" --gpu {self.target.gpu.id}" if self.target.gpu is not None and not self.target.here else ""


def parse_scaling(text: str) -> LossScaling:
    """
    >>> parse_scaling("dynamic"), parse_scaling("manual:1024").factor, parse_scaling("manual").factor
    (LossScaling(kind='dynamic', factor=None), 1024.0, 1000.0)
    """
    kind, colon, number = text.strip().lower().partition(":")
    if kind not in SCALINGS or (colon and kind != "manual"):
        raise BadInput(f"scaling {text[:80]!r}: expected none, dynamic, manual or manual:1000.")
    if kind != "manual":
        return LossScaling(kind)
    try:
        factor = float(number) if colon else USUAL_FACTOR
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"scaling {text[:80]!r}: expected a factor above zero, such as manual:1000.")
    return LossScaling(kind, factor)


def _known(kind: str, name: str | None, known: Iterable[str], listing: str) -> None:
    if name is not None and name not in known:
        raise UnknownName(kind, name, known, listing=listing)
