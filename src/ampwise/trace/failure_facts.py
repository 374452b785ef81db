"""The parts of a failure: tensors, the operation and the data that it comes from, its optimizer, fixes tried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampwise.finding import strict_json
from ampwise.finding.call_site import CallSite
from ampwise.numbers.census.algebra import Census
from ampwise.numbers.number_text import number_text
from ampwise.numbers.op_families import base_name, family_of

__all__ = [
    "FP32_MAX",
    "MASKS",
    "BadTensor",
    "DataOrigin",
    "FixTrial",
    "OptimizerFacts",
    "Origin",
    "RoundedLiteral",
    "TensorSummary",
    "known_as_json",
]

LARGEST_LR = 1e3
GROWTH = 1e3  # times their first norm that weights do not reach in a healthy run
FP16_MAX = 65504.0
FP32_MAX = math.ldexp(2 - 2**-23, 127)
NARROW = ("fp16", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2")  # formats with a smaller range than FP32
MASKS = ("attn_bias", "attn_mask")  # arguments that may be -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """Summary of a tensor's values."""

    dtype: str  # "fp16"; torch's name for other dtypes: "int64"
    shape: tuple[int, ...] = ()
    low: float | None = None  # of the finite values; None if there are none, or not measured
    high: float | None = None
    census: Census | None = None
    name: str = ""  # of the argument: "self", "other", "mat1"
    negative_infs: int = 0  # infinities that are negative, if measured

    def __str__(self) -> str:
        if not self.shape:
            special = next((name for name, count in self.special.items() if count), "")
            number = special if self.low is None else number_text(self.low)
            return " ".join(filter(None, (self.dtype, "number", number)))
        parts = [f"{self.dtype} {'×'.join(map(str, self.shape))}"]
        if self.low is not None and self.high is not None:
            parts.append(" to ".join(map(number_text, dict.fromkeys((self.low, self.high)))))
        total = self.census.count if self.census is not None else 0
        parts += [f"all {name}" for name, count in self.special.items() if count and count == total]
        for name, count in self.special.items():
            if 0 < count < total:
                zeros = f"zero{'s' if count != 1 else ''}"
                parts.append(f"{count:,} {zeros if name == '0' else name}")
        return ", ".join(parts)

    @property
    def special(self) -> dict[str, int]:
        """Counts of zero, inf, -inf and NaN."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedLiteral:
    """A literal that its format cannot represent: 1e-8 in FP16 is 0."""

    value: float
    becomes: float
    dtype: str
    site: CallSite = field(default_factory=CallSite)

    @property
    def is_bound(self) -> bool:
        """Whether it is to keep values away from 1 or -1, and rounds to that."""
        return abs(self.becomes) == 1 > abs(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An operation whose result is not finite although its inputs are, or that turns infinities into NaN."""

    op: str  # "aten.addmm.default"
    made: str  # "inf" or "nan"
    dtype: str  # of its result
    phase: str = "forward"  # "backward", "optimizer"
    site: CallSite = field(default_factory=CallSite)  # for a backward operation: the line of its forward operation
    live: bool = True  # the line itself was executing; else it had run in the forward pass
    module: str = ""  # path: "blocks.3.mlp.fc"
    module_class: str = ""
    derivative_of: str = ""  # for a backward operation: the forward operation
    hidden: str = ""  # for a backward operation: a bad forward result that later operations hid
    inputs: tuple[TensorSummary, ...] = ()
    output: TensorSummary | None = None
    by_hand: bool = False  # the infinity was written by the script: a mask, a constant
    from_infinities: bool = False  # some inputs contained infinities
    # Results of rerunning the operation; None if it was not rerun.
    exact: str | None = None  # the result of the same inputs in FP64: "finite", "inf", "nan"
    exact_largest: float | None = None  # the largest magnitude in FP64
    zero_divisors: int = 0
    outside_domain: int = 0  # arguments outside the domain of a logarithm, root or inverse function
    masked_rows: int = 0  # softmax rows that are all -inf
    literals: tuple[RoundedLiteral, ...] = ()
    exponential: CallSite = field(default_factory=CallSite)  # of a sum that overflows: the exponentials that it adds

    @property
    def family(self) -> str:
        return family_of(self.op)

    @property
    def name(self) -> str:
        """Short name: "addmm", "div"."""
        return base_name(self.op)

    @property
    def is_narrow(self) -> bool:
        """Whether the format of its result has a smaller range than FP32."""
        return self.dtype in NARROW

    @property
    def may_be_kernel_fault(self) -> bool:
        """Whether its inputs are finite, and nothing is known to keep its result from being finite in its format."""
        for each in self.inputs:
            counts = each.special
            if counts.get("NaN") or counts.get("inf") or (counts.get("-inf") and each.name not in MASKS):
                return False
        excused = self.by_hand or self.zero_divisors or self.outside_domain or self.masked_rows
        fits = self.exact in ("finite", None) and (self.exact_largest or 0.0) <= (
            FP16_MAX if self.dtype == "fp16" else FP32_MAX
        )
        return bool(self.inputs) and not excused and fits

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "made": "NaN" if self.made == "nan" else self.made,
            "dtype": self.dtype,
            "module": self.module,
            "module_class": self.module_class,
            "phase": self.phase,
            "derivative_of": self.derivative_of,
            "called_from": self.site.called_from,
            "through": self.site.through,
            "inputs": [values.as_dict() for values in self.inputs],
            "output": None if self.output is None else self.output.as_dict(),
            "exact": self.exact,
            "exact_largest": self.exact_largest,
            "zero_divisors": self.zero_divisors or None,
            "outside_domain": self.outside_domain or None,
            "masked_rows": self.masked_rows or None,
            "literals": [
                {"value": each.value, "becomes": each.becomes, "dtype": each.dtype, "place": each.site.in_text}
                for each in self.literals
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrigin:
    """Where a bad value of a batch came from, found by drawing its sample from the dataset again."""

    dataset: str  # its class: "Windows"
    index: str  # of the first bad sample in the dataset, as Python prints it
    indices: tuple[str, ...] = ()  # of the first few bad samples of the batch
    how: str = "drawn"  # "computed", "held" by the dataset already, or only "drawn": it is not known how
    cause: str = ""  # what computed it, or what holds it: "the division (div) gives NaN: the divisor is 0"
    fix: str = ""
    site: CallSite = field(default_factory=CallSite)  # the line that computed it; else the function that returns it
    is_example: bool = False  # the sample is like that of the batch, whose indices are unknown
    tries: int = 1  # times that samples were drawn until one was bad again

    def as_dict(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "index": self.index,
            "indices": self.indices,
            "how": self.how,
            "cause": self.cause,
            "function": self.site.function,
            "place": str(self.site) if self.site.file else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BadTensor:
    """A tensor that was not finite before the step."""

    what: str  # "parameter", "buffer", "batch", or "other": captured by the function
    name: str = ""  # "blocks.0.weight"; for a batch: "x", "batch['pixels']"
    values: TensorSummary | None = None
    module_class: str = ""
    rows: tuple[int, ...] = ()  # indices of the first few bad samples
    bad_rows: int = 0  # number of bad samples
    first_use: Origin | None = None  # the operation that read it first
    made_at: CallSite = field(default_factory=CallSite)  # where numpy computed it, or a module took the memory
    made_by: str = "numpy computed an invalid value"  # what did that
    advice: str = ""  # what to do about it
    drawn: DataOrigin | None = None  # where it came from, if the batch could be drawn again

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "name": self.name,
            "module_class": self.module_class,
            "values": None if self.values is None else self.values.as_dict(),
            "samples": self.rows,
            "bad_samples": self.bad_rows or None,
            "drawn_again": None if self.drawn is None else known_as_json(self.drawn.as_dict()),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Settings and state of the optimizer of a bad parameter."""

    name: str  # "AdamW"
    eps: float | None = None
    eps_becomes: float | None = None  # in the format of the parameter
    dtype: str = ""
    lr: float | None = None
    steps: int = 0  # taken so far
    weight_decay: float | None = None
    made_at: CallSite = field(default_factory=CallSite)
    lr_set_at: CallSite = field(default_factory=CallSite)  # where its learning rate was set last
    first_norm: float | None = None  # of its weights, before its first step
    norm: float | None = None  # the last that was finite
    zero_denominators: int | None = None  # bad weights whose second moment is 0
    bad_weights: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether the format of the parameter has a smaller range than FP32."""
        return self.dtype in NARROW

    @property
    def has_divided(self) -> bool:
        """Whether a division may have made the weights bad: not if it has none (SGD), or never divided by 0."""
        divides = self.steps > 0 and self.eps is not None and self.zero_denominators != 0
        return divides and not self.has_absurd_lr

    @property
    def has_exploded(self) -> bool:
        """Whether its weights have grown as no training makes them grow."""
        first, now = self.first_norm, self.norm
        return first is not None and now is not None and first > 0 and now > GROWTH * max(first, 1.0)

    @property
    def has_absurd_lr(self) -> bool:
        """Whether the learning rate alone corrupts any weights."""
        return self.lr is not None and not abs(self.lr) <= LARGEST_LR


@dataclass(frozen=True, slots=True, kw_only=True)
class FixTrial:
    """A fix that was tried in the replay."""

    what: str  # "`blocks.3` in FP32"
    code: str
    finite: bool  # loss and gradients
    change: str = ""  # the kind of fix, and its target, as in Remedy
    argument: str = ""
    loss: float | None = None  # after
    bad_gradients: int = 0  # after
    origin: Origin | None = None  # of what is not finite with it, if that is known
    usual: tuple[float, float] | None = (
        None  # the loss of an earlier, good batch without and with it, if one is at hand
    )
    rounding: float = 0.0  # relative change of that loss that rounding explains

    @property
    def helps(self) -> bool:
        """Whether the step is finite with it, and an earlier batch, if there is one, gives the same loss."""
        before, after = self.usual or (0.0, 0.0)
        return self.finite and abs(after - before) <= self.rounding * max(abs(before), abs(after))


def known_as_json(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values, ready for JSON: numbers that are not finite as strings."""
    return {key: strict_json.to_json_types(value) for key, value in evidence.items() if value not in (None, "", (), [])}
