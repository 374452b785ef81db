"""An incident: a training step that went bad, and where that began; what rules about operations look at.

It is put together by replaying the step (``ampwise.trace``). A value that is not finite either came in from outside
(``Source``) or was born in an operation (``Birth``); the kind of the incident follows from these facts alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ampwise import strict_json
from ampwise.census.algebra import Census
from ampwise.evidence.conduct import Site
from ampwise.evidence.op_families import base_name, family_of, is_collective, is_custom
from ampwise.evidence.wording import number

__all__ = ["KINDS", "Birth", "Incident", "Literal", "OptimizerFacts", "Source", "Trial", "Values"]

LARGEST_LR = 1e3
NARROW = ("fp16", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2")  # formats that FP32 holds more than


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a tensor held."""

    dtype: str  # "fp16"; as torch says it for what is no format of ours: "int64"
    shape: tuple[int, ...] = ()
    low: float | None = None  # of the finite values; None where there are none, or nobody looked
    high: float | None = None
    census: Census | None = None
    name: str = ""  # of the argument: "self", "other", "mat1"
    negative_infs: int = 0  # of the census's, where somebody looked

    def __str__(self) -> str:
        if not self.shape:
            return " ".join(filter(None, (self.dtype, "number", self._number())))
        extent = "" if self.low is None or self.high is None else f", {_range(self.low, self.high)}"
        return f"{self.dtype} {'×'.join(map(str, self.shape))}{extent}{self._counts()}"

    def _number(self) -> str:
        if self.low is not None:
            return number(self.low)
        return next((name for name, count in self.special.items() if count), "")

    def _counts(self) -> str:
        total = self.census.count if self.census is not None else 0
        whole = [f"all {name}" for name, count in self.special.items() if count and count == total]
        named = [_of(count, name) for name, count in self.special.items() if count and count < total]
        return "".join(f", {each}" for each in (*whole, *named))

    @property
    def special(self) -> dict[str, int]:
        """How many are 0 or not finite, by what they are."""
        if self.census is None:
            return {}
        below = min(self.negative_infs, self.census.infs)
        return {"0": self.census.zeros, "inf": self.census.infs - below, "-inf": below, "NaN": self.census.nans}

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.name:
            plain["name"] = self.name
        if self.low is not None and self.high is not None:
            plain |= {"low": self.low, "high": self.high}
        if self.census is not None:
            plain["census"] = self.census.as_dict()
        if self.negative_infs:
            plain["negative_infs"] = self.negative_infs
        return plain


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _of(count: int, name: str) -> str:
    if name == "0":
        return f"{count:,} zero{'s' if count != 1 else ''}"
    return f"{count:,} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """A number in the source that the format it was used in does not hold: 1e-8 in FP16 is 0."""

    value: float
    becomes: float
    dtype: str
    site: Site = field(default_factory=Site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """An operation whose result is not finite though nothing that went into it was; or that made NaN of infinities."""

    op: str  # "aten.addmm.default"
    made: str  # "inf" or "nan"
    dtype: str  # what its result is in
    phase: str = "forward"  # "backward", "optimizer"
    site: Site = field(default_factory=Site)  # of a backward operation: the line it is the derivative of
    live: bool = True  # the line itself was running; else it had run in the forward pass
    module: str = ""  # path: "blocks.3.mlp.fc"
    module_class: str = ""
    derivative_of: str = ""  # of a backward operation: the forward operation
    hidden: str = ""  # of a backward operation: what the forward operation had made, and others have hidden since
    inputs: tuple[Values, ...] = ()
    output: Values | None = None
    by_hand: bool = False  # the infinity was written there as one: a mask, a constant
    from_infinities: bool = False  # some of the inputs had infinities
    # What a closer look at the operation has shown; None where nobody looked.
    exact: str | None = None  # what the same inputs give in FP64: "finite", "inf", "nan"
    exact_largest: float | None = None  # the largest magnitude in FP64
    zero_divisors: int = 0
    outside_domain: int = 0  # arguments of a logarithm, root, arc function that it has no finite value for
    masked_rows: int = 0  # rows of a softmax with nothing but -inf
    literals: tuple[Literal, ...] = ()

    @property
    def family(self) -> str:
        return family_of(self.op)

    @property
    def name(self) -> str:
        """As a user knows it: "addmm", "div"."""
        return base_name(self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that was there before the step, and not finite."""

    what: str  # "parameter", "buffer", "batch", or "other": what the function brings along itself
    name: str = ""  # "blocks.0.weight"; of a batch: "x", "batch['pixels']"
    values: Values | None = None
    module_class: str = ""
    rows: tuple[int, ...] = ()  # which of the batch's samples, the first few
    bad_rows: int = 0  # how many
    first_use: Birth | None = None  # the operation that read it first


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What the optimizer of a bad parameter says."""

    name: str  # "AdamW"
    eps: float | None = None
    eps_becomes: float | None = None  # in the format of the parameter
    dtype: str = ""
    steps: int = 0  # that it has taken
    zero_denominators: int | None = None  # of the bad weights, how many have a second moment of 0
    bad_weights: int = 0
    lr: float | None = None

    @property
    def has_divided(self) -> bool:
        """It may have made the weights bad by a division: not if it has none (SGD), or never divided them by 0."""
        divides = self.steps > 0 and self.eps is not None and self.zero_denominators != 0
        return divides and not self.has_absurd_lr

    @property
    def has_absurd_lr(self) -> bool:
        """A learning rate that spoils any weights by itself."""
        return self.lr is not None and not abs(self.lr) <= LARGEST_LR


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A remedy that was tried in the replay."""

    what: str  # "`blocks.3` in FP32"
    code: str
    finite: bool  # loss and gradients
    change: str = ""  # the kind of remedy, and what it was done to: those of the Remedy
    argument: str = ""
    loss: float | None = None  # after
    bad_gradients: int = 0  # after


# What can have happened, each with a rule of the same name.
KINDS = (
    "bad-batch",
    "bad-weights",
    "poisoned-statistics",
    "half-overflow",
    "overflow",
    "outside-domain",
    "division-by-zero",
    "fully-masked-row",
    "mean-of-nothing",
    "infinite-derivative",
    "gradient-overflow",
    "optimizer-division",
    "custom-op",
    "from-another-rank",
    "not-reproduced",
    "swallowed-infinity",
    "cancelled-infinities",
    "unstable-loss",
)
# Families of operations that fail in one way, unless FP64 would do.
FIXED = {"normalisation": "division-by-zero", "determinant": "outside-domain", "loss": "unstable-loss"}
DEFINED_IN_PART = ("logarithm", "gamma", "root", "power", "arc")
OF_SOURCES = {"parameter": "bad-weights", "buffer": "poisoned-statistics"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A step that went bad, and all that its replay has shown."""

    symptom: str = "loss"  # what is not finite: that, or "gradients"; "value" of one that was swallowed
    loss: float | None = None
    bad_gradients: tuple[str, ...] = ()  # parameters
    gradients: int = 0  # all of them
    birth: Birth | None = None  # the guilty operation
    nan_birth: Birth | None = None  # where infinities became NaN, if that was elsewhere
    source: Source | None = None  # or what came in
    precision: str = "fp32"
    device: str = "cuda"  # as torch.autocast calls it
    scale: float = 1.0  # of the loss, when it failed
    fitting_scale: float | None = None  # the largest power of two at which gradients would be finite
    step: int | None = None
    rank: int | None = None  # where it arose, of several
    ranks: int = 1
    has_modules: bool = True  # some operations ran in modules
    swallowed: bool = False  # the infinity went away again, and left a finite value
    not_reproduced: str = ""  # what was tried, if the replay was finite
    remarks: tuple[str, ...] = ()  # what should be known of the replay
    optimizer: OptimizerFacts | None = None
    trials: tuple[Trial, ...] = ()

    def but(self, **changes: Any) -> Incident:
        return replace(self, **changes)

    @property
    def culprit(self) -> Birth | None:
        """The operation to look at: where it was born, or where the bad value was read first."""
        return self.birth or (self.source.first_use if self.source is not None else None)

    @property
    def site(self) -> Site:
        return self.culprit.site if self.culprit is not None else Site()

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        if self.not_reproduced:
            return "not-reproduced"
        if self.source is not None:
            return self._kind_of_source(self.source)
        if self.birth is None:
            return "not-reproduced"
        if is_collective(self.birth.op):
            return "from-another-rank"
        return "swallowed-infinity" if self.swallowed else self._kind_of_birth(self.birth)

    def _kind_of_source(self, source: Source) -> str:
        if source.what == "parameter" and self.optimizer is not None and self.optimizer.has_divided:
            return "optimizer-division"
        return OF_SOURCES.get(source.what, "bad-batch")

    def _kind_of_birth(self, birth: Birth) -> str:
        if is_custom(birth.op):
            return "custom-op"
        if birth.phase == "optimizer":
            return "optimizer-division"
        if birth.by_hand:
            return "cancelled-infinities"
        if birth.from_infinities:
            return "fully-masked-row" if birth.family == "softmax" else "cancelled-infinities"
        if birth.phase == "backward" and not birth.live:
            overflowed = birth.exact == "finite" or (birth.exact is None and birth.dtype in NARROW)
            return "gradient-overflow" if overflowed else "infinite-derivative"
        kind = self._kind_of_forward(birth)
        # In a hook, or in a backward pass of one's own.
        return "gradient-overflow" if birth.phase == "backward" and kind.endswith("overflow") else kind

    def _kind_of_forward(self, birth: Birth) -> str:
        if birth.made == "nan" and (birth.family == "mean" or any(0 in each.shape for each in birth.inputs)):
            return "mean-of-nothing"
        if birth.family == "softmax" and birth.made == "nan":
            return "fully-masked-row"
        in_loss = self.has_modules and (not birth.module_class or birth.module_class.endswith("Loss"))
        if in_loss and (birth.family == "exponential" or (birth.family == "logarithm" and _is_outside(birth))):
            return "unstable-loss"
        if birth.family in FIXED and not (birth.family == "normalisation" and birth.exact == "finite"):
            return FIXED[birth.family]
        if birth.zero_divisors:
            return "division-by-zero"
        if _is_outside(birth) or (birth.made == "nan" and birth.family in DEFINED_IN_PART):
            return "outside-domain"
        if birth.family == "division" and birth.exact != "finite":
            return "division-by-zero"
        fits_fp32 = birth.exact in ("finite", None) and (birth.exact_largest or 0.0) <= FP32_MAX
        return "half-overflow" if birth.dtype in NARROW and fits_fp32 else "overflow"


def _is_outside(birth: Birth) -> bool:
    """Where nobody could look: a logarithm is infinite at the end of what it takes, and nowhere else."""
    return bool(birth.outside_domain) or (birth.output is None and birth.family in ("logarithm", "gamma", "arc"))


FP32_MAX = math.ldexp(2 - 2**-23, 127)


def plain(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not known, ready for JSON: numbers that are not finite as words."""
    return {key: strict_json.plain(value) for key, value in evidence.items() if value not in (None, "", (), [])}
