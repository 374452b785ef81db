"""Expected speedup of a precision over FP32, derived from peaks and sizes.

Only the matmuls of a step get faster: if they take a fraction ``f`` of its time, and the peaks differ by ``r``, the
step runs ``1 / (1 - f + f / r)`` times as fast (Amdahl). The fraction depends on the model's size, within wide limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampwise.rules.evidence.choice.model import ModelFacts
from ampwise.rules.evidence.choice.target import Target

__all__ = ["MEASURED", "MEASURED_FP8", "ExpectedGain", "expected_gain"]

# Fraction of an FP32 step spent in matmuls, from and to, by the model's work.
# The classes are the customary ones; the fractions cover what was measured on one H200 (below).
SHARES: tuple[tuple[float, float, float], ...] = (
    (10e6, 0.0, 0.25),
    (50e6, 0.25, 0.55),
    (200e6, 0.55, 0.92),
    (math.inf, 0.70, 0.97),
)
ANY_SHARE = (0.0, 0.97)

# Tokens per second of GPT-2 124M, 16×1024 tokens, eager, on one H200; compiled BF16 reached 496 k.
MEASURED: dict[str, float] = {"fp32": 54e3, "tf32": 157e3, "fp16": 318e3, "bf16": 325e3}
MEASURED_COMPILED = 496e3  # in BF16
# FP8 over BF16, compiled, whole steps on one H200: at 1.3 B with per-row scales, and at width 4096.
MEASURED_FP8 = (0.95, 1.33)

CONVOLUTIONS = ("cnn", "diffusion")


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


def expected_gain(target: Target, model: ModelFacts, precision: str) -> ExpectedGain | None:
    """Return the expected gain of a whole uncompiled step; None if a peak is unknown, and for FP32 itself."""
    if precision == "fp32":
        return None
    if precision == "fp8":
        ratio = target.ratio("fp8", "bf16")
        if ratio is None:
            return None
        low, high = MEASURED_FP8
        return ExpectedGain(low=low, high=high, ceiling=ratio.value, over="bf16", measured=True)
    wide = _by_default(target, model)
    ratio = target.ratio(precision, wide)
    if ratio is None:
        return None
    lowest, highest = _share(model)
    return ExpectedGain(
        low=_amdahl(lowest, ratio.value),
        high=_amdahl(highest, ratio.value),
        ceiling=ratio.value,
        over=wide,
        approximate=ratio.approximate,
    )


def _by_default(target: Target, model: ModelFacts) -> str:
    """Return what "FP32" runs in by default: cuDNN convolutions use TF32, matmuls do not."""
    return "tf32" if model.kind in CONVOLUTIONS and target.kind == "cuda" and target.has("tf32") else "fp32"


def _share(model: ModelFacts) -> tuple[float, float]:
    work = model.work
    if work is None:
        return ANY_SHARE
    return next((low, high) for limit, low, high in SHARES if work < limit)


def _amdahl(share: float, ratio: float) -> float:
    return 1 / (1 - share + share / ratio)
