"""A question about a precision: the device, the model, what is planned, proposed, wrong, and measured."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ampwise.errors import BadInput, UnknownName
from ampwise.finding import Finding, Place, Rule
from ampwise.hardware.catalog import COMMON_FORMATS
from ampwise.hardware.target import Target
from ampwise.tune.advise.claims import HALVES, IDEAS
from ampwise.tune.advise.model import KINDS, ModelFacts
from ampwise.tune.advise.symptoms import SYMPTOMS
from ampwise.tune.bench.verdict import SpeedVerdict, verdict_of

USUAL_FACTOR = 1000.0  # of a manual loss scale

# Speed-up of BF16 over FP32 without TF32, by millions of parameters: whole eager steps of GPTs on one H200, with 1,024
# tokens a step and with 8,192; at 124 M with 16,384 (benchmarks/results/sizes_gpu.json; precisions_gpt2_gpu.json).
SPEEDUPS_FEW_TOKENS = {12.61: 0.7725, 124.5: 0.9703, 354.9: 1.191, 1314.0: 4.462, 2964.0: 4.976}
SPEEDUPS_MANY_TOKENS = {
    1.055: 0.7749, 3.946: 0.8764, 12.61: 1.162, 29.94: 2.682, 124.5: 6.02, 354.9: 6.981, 1314.0: 8.655, 2964.0: 9.08
}  # fmt: skip
H200_FP32, H200_BF16 = 66.9e12, 989.4e12  # dense peaks

# Tokens per second of GPT-2 124M, 16×1024 tokens, eager, on one H200; compiled BF16 reached 496 k.
MEASURED: dict[str, float] = {"fp32": 54e3, "tf32": 157e3, "fp16": 318e3, "bf16": 325e3}
MEASURED_COMPILED = 496e3  # in BF16
# FP8 over BF16, compiled, whole steps on one H200: at 1.3 B with per-row scales, and at width 4096 by ampwise's.
MEASURED_FP8 = (0.95, 1.39)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGain:
    """Speedup of a whole step: a range, and the upper bound that no step reaches."""

    low: float
    high: float
    ceiling: float  # the ratio of the dense peaks
    over: str  # the baseline: "fp32", "tf32" where that is torch's default, "bf16"
    approximate: bool = False  # a peak is approximate
    measured: bool = False  # measured on another device, not derived

    @property
    def text(self) -> str:
        """
        >>> ExpectedGain(low=1.93, high=4.71, ceiling=7.96, over="fp32").text
        '1.9–4.7×'
        """
        return f"{'~' if self.approximate else ''}{self.low:.1f}–{self.high:.1f}×"


def share_of_matmuls(parameters: float, speedups: Mapping[float, float]) -> float:
    """Return the share of an FP32 step that explains the speed-ups, between sizes by the logarithm of their numbers.

    It is negative where autocast costs more than it saves.

    >>> round(share_of_matmuls(124.5e6, SPEEDUPS_MANY_TOKENS), 3)
    0.894
    """
    sizes = [1e6 * millions for millions in speedups]
    shares = [(1 - 1 / speedup) / (1 - H200_FP32 / H200_BF16) for speedup in speedups.values()]
    above = bisect.bisect(sizes, parameters)
    if above in (0, len(sizes)):
        return shares[min(above, len(sizes) - 1)]
    (small, large), (low, high) = sizes[above - 1 : above + 1], shares[above - 1 : above + 1]
    return low + (high - low) * math.log(parameters / small) / math.log(large / small)


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How the loss is scaled: not at all ("none"), by a GradScaler ("dynamic"), or by a fixed factor ("manual")."""

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
        asked: tuple[tuple[str, Iterable[str | None], Iterable[str]], ...] = (
            ("precision", [self.want], COMMON_FORMATS),
            ("symptom", [self.symptom], SYMPTOMS),
            ("kind of model", [self.model.kind], KINDS),
            ("idea", self.ideas, IDEAS),
        )
        for kind, names, known in asked:
            for name in names:
                if name is not None and name not in known:
                    is_long = kind == "idea"
                    listing = "`ampwise advise --ideas` lists them." if is_long else f"There are {', '.join(known)}."
                    raise UnknownName(kind, name, known, listing=listing)
        if self.measured is not None and not (math.isfinite(self.measured) and 0 < self.measured <= 1000):
            raise BadInput(f"measured speedup {self.measured:g}: expected a number such as 1.8.")

    def proposes(self, *ideas: str) -> bool:
        """Return whether any of these ideas was proposed."""
        return any(idea in self.ideas for idea in ideas)

    def scales(self, kind: str) -> bool:
        """Return whether this kind of loss scaling is planned: "none", "dynamic" or "manual"."""
        return self.scaling is not None and self.scaling.kind == kind

    @property
    def factor(self) -> float:
        """The factor of a manual loss scale: the planned one, or the usual one."""
        return (self.scaling.factor if self.scaling else None) or USUAL_FACTOR

    @property
    def exact(self) -> bool:
        """Whether the work needs FP32 accuracy."""
        return self.proposes("exact-numbers", "complex-numbers")

    @property
    def no_gain_measured(self) -> bool:
        return self.measured is not None and verdict_of(self.measured) is SpeedVerdict.STAY

    @property
    def stays_wide(self) -> bool:
        """Whether 16-bit is ruled out: by the accuracy needed, or by a measurement, unless it is to save memory."""
        return self.exact or (self.no_gain_measured and self.symptom != "memory")

    @property
    def half(self) -> str | None:
        """The 16-bit format in question: the requested one, else the one the device has tensor cores for.

        None if there are tensor cores for neither, or 16-bit is ruled out.
        """
        if self.stays_wide:
            return None
        if self.want in HALVES and self.target.has(self.want) is not False:
            return self.want
        return self.target.half

    def gain(self, precision: str) -> ExpectedGain | None:
        """Return the expected gain of a whole uncompiled step; None if a peak is unknown, and for FP32 itself.

        Only the matmuls of a step get faster: if they take a share ``f`` of its time, and the peaks differ by ``r``,
        the step runs ``1 / (1 - f + f / r)`` times as fast (Amdahl). Shares are those measured on an H200; a GPU that
        is slower in FP32 spends as much of its time in the matmuls of a smaller model.
        """
        target, model = self.target, self.model
        # What "FP32" runs in by default: cuDNN convolutions use TF32, matmuls do not.
        convolves = model.kind in ("cnn", "diffusion") and target.kind == "cuda" and target.has("tf32")
        over = "bf16" if precision == "fp8" else "tf32" if convolves else "fp32"
        ratio = target.ratio(precision, over)
        if precision == "fp32" or ratio is None:
            return None
        if precision == "fp8":
            low, high = MEASURED_FP8
            return ExpectedGain(low=low, high=high, ceiling=ratio.value, over=over, measured=True)
        smallest, largest = 0.0, math.inf  # where the size is unknown
        if model.work is not None:
            wide = target.peak("fp32")
            smallest = largest = model.work * (1.0 if wide is None else H200_FP32 / wide.value)
        shares = share_of_matmuls(smallest, SPEEDUPS_FEW_TOKENS), share_of_matmuls(largest, SPEEDUPS_MANY_TOKENS)
        if precision == "tf32":  # which casts nothing, so it costs nothing
            shares = max(shares[0], 0.0), max(shares[1], 0.0)
        low, high = (1 / (1 - share + share / ratio.value) for share in shares)
        return ExpectedGain(low=low, high=high, ceiling=ratio.value, over=over, approximate=ratio.approximate)

    @property
    def make(self) -> str:
        """The function named in suggested commands: the user's own, or a placeholder."""
        return self.model.name if self.model.name and ":" in self.model.name else "train.py:make"

    @property
    def elsewhere(self) -> str:
        """The ``--gpu`` option for commands that estimate for a device that is not in this machine."""
        return f" --gpu {self.target.gpu.id}" if self.target.gpu is not None and not self.target.here else ""

    @property
    def memory_command(self) -> str:
        """The command that estimates the memory of a whole step."""
        model = self.model
        if model.read or model.parameters is None or model.kind not in (None, "transformer"):
            return f"ampwise memory {self.make}{self.elsewhere}"
        return f"ampwise memory --params {model.size.replace(' ', '')}{self.elsewhere}"

    def finding(
        self,
        answer: str,
        rule: Rule,
        fact: str,
        *,
        costs: Mapping[str, str],
        show: tuple[str, str],
        do: str | None = None,
        refuses: str | None = None,
    ) -> Finding:
        """Return what a rule says: "no", or "careful" where it is possible and has a price.

        ``costs`` is the cost of each option, ``show`` a command that answers the question in minutes and what it
        shows, ``do`` what to do instead (by default the rule's fix), ``refuses`` the precision that is rejected.
        """
        evidence = {"answer": answer, "costs": dict(costs), "to_know": {"command": show[0], "tells": show[1]}}
        if refuses is not None:
            evidence["refuses"] = refuses
        return rule.at(Place(device=self.target.name), fact, evidence=evidence, fix=do)


def parse_scaling(text: str) -> LossScaling:
    """
    >>> parse_scaling("dynamic"), parse_scaling("manual:1024").factor, parse_scaling("manual").factor
    (LossScaling(kind='dynamic', factor=None), 1024.0, 1000.0)
    """
    kind, colon, number = text.strip().lower().partition(":")
    if kind in ("none", "dynamic") and not colon:
        return LossScaling(kind)
    if kind != "manual":
        raise BadInput(f"scaling {text[:80]!r}: expected none, dynamic, manual or manual:1000.")
    try:
        factor = float(number) if colon else USUAL_FACTOR
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"scaling {text[:80]!r}: expected a factor above zero, such as manual:1000.")
    return LossScaling(kind, factor)
