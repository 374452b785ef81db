"""A question about a precision, with all that is known: what the rules in ``rules/choice`` look at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampwise.errors import BadInput, UnknownName
from ampwise.evidence.choice.gain import Gain, expected
from ampwise.evidence.choice.ideas import EXACT, IDEAS, SYMPTOMS
from ampwise.evidence.choice.model import KINDS, ModelFacts
from ampwise.evidence.choice.target import Target
from ampwise.evidence.speed_verdict import Verdict, verdict_of
from ampwise.hardware.catalog import COMMON_FORMATS

__all__ = ["HALVES", "NARROW", "WANTED", "Choice", "Scaling", "parse_scaling"]

WANTED = COMMON_FORMATS
HALVES = ("fp16", "bf16")
NARROW = ("fp8", "mxfp8", "mxfp4", "nvfp4")
SCALINGS = ("none", "dynamic", "manual")
USUAL_FACTOR = 1000.0  # what people say when they mean "by hand"
EXAMPLE = "train:make"  # a function that makes model, batch and loss, where the user has named none


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the loss is to be scaled: not at all, by a GradScaler, or by a factor."""

    kind: str
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was asked. ``want`` and ``scaling`` are None where nobody said."""

    target: Target
    model: ModelFacts = field(default_factory=ModelFacts)
    want: str | None = None
    scaling: Scaling | None = None
    ideas: tuple[str, ...] = ()
    symptom: str | None = None
    measured: float | None = None  # the speed-up of 16 bits over FP32, where somebody measured it

    def __post_init__(self) -> None:
        _known("precision", self.want, WANTED, f"There are {', '.join(WANTED)}.")
        _known("symptom", self.symptom, SYMPTOMS, f"There are {', '.join(SYMPTOMS)}.")
        _known("kind of model", self.model.kind, KINDS, f"There are {', '.join(KINDS)}.")
        for idea in self.ideas:
            _known("idea", idea, IDEAS, "`ampwise advise --ideas` lists them.")
        if self.measured is not None and not (math.isfinite(self.measured) and 0 < self.measured <= 1000):
            raise BadInput(f"a measured speed-up of {self.measured:g}: a number such as 1.8 is expected.")

    def proposes(self, *ideas: str) -> bool:
        """Whether any of these is among what was proposed."""
        return any(idea in self.ideas for idea in ideas)

    @property
    def exact(self) -> bool:
        """Whether the numbers are such that only FP32 is left."""
        return self.proposes(*EXACT)

    @property
    def stays_wide(self) -> bool:
        """Whether 16 bits are out of the question: for such numbers, or as they were measured to gain nothing."""
        for_memory = self.symptom == "memory"  # activations shrink, whatever the speed
        no_gain = self.measured is not None and verdict_of(self.measured) is Verdict.STAY
        return self.exact or (no_gain and not for_memory)

    @property
    def half(self) -> str | None:
        """The 16-bit format that the question is about: the one wanted, else what the device has units for.

        None where there are units for neither, or where 16 bits are out of the question.
        """
        if self.stays_wide:
            return None
        wanted = self.want if self.want in HALVES else None
        return wanted if wanted is not None and self.target.has(wanted) is not False else self.target.half

    def gain(self, precision: str) -> Gain | None:
        """What it may gain over FP32."""
        return expected(self.target, self.model, precision)

    @property
    def subject(self) -> str:
        """What commands are given: the user's own function, or an example of one."""
        return self.model.name if self.model.name and ":" in self.model.name else EXAMPLE

    @property
    def elsewhere(self) -> str:
        """What tells a command that counts, and does not measure, of a device that is not here."""
        return f" --gpu {self.target.gpu.id}" if self.target.gpu is not None and not self.target.here else ""


def parse_scaling(text: str) -> Scaling:
    """
    >>> parse_scaling("dynamic"), parse_scaling("manual:1024").factor, parse_scaling("manual").factor
    (Scaling(kind='dynamic', factor=None), 1024.0, 1000.0)
    """
    kind, colon, number = text.strip().lower().partition(":")
    if kind not in SCALINGS or (colon and kind != "manual"):
        raise BadInput(f"scaling {text[:80]!r}: none, dynamic, manual or manual:1000 is expected.")
    if kind != "manual":
        return Scaling(kind)
    try:
        factor = float(number) if colon else USUAL_FACTOR
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"scaling {text[:80]!r}: the factor is to be a number above zero, such as manual:1000.")
    return Scaling(kind, factor)


def _known(kind: str, name: str | None, known: Iterable[str], listing: str) -> None:
    if name is not None and name not in known:
        raise UnknownName(kind, name, known, listing=listing)
