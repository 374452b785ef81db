"""What a precision may gain over FP32: derived from peaks and sizes.

A step gains on its matrix products alone: with a share ``f`` of its time in them and peaks that differ by ``r``, it
runs ``1 / (1 - f + f / r)`` times as fast (Amdahl). How large the share is goes by the size of the model, and is wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampwise.evidence.choice.model import ModelFacts
from ampwise.evidence.choice.target import Target

__all__ = ["MEASURED", "MEASURED_FP8", "Gain", "expected"]

# Of the time of a step in FP32, what goes into matrix products, from and to, by the work of the model.
# The classes are those that people use; the shares are such that what was measured on one H200 (below) lies within.
SHARES: tuple[tuple[float, float, float], ...] = (
    (10e6, 0.0, 0.25),
    (50e6, 0.25, 0.55),
    (200e6, 0.55, 0.92),
    (math.inf, 0.70, 0.97),
)
ANY_SHARE = (0.0, 0.97)

# Tokens a second of GPT-2 124M, 16×1024 tokens, eager, on one H200; compiled, BF16 made 496 k.
MEASURED: dict[str, float] = {"fp32": 54e3, "tf32": 157e3, "fp16": 318e3, "bf16": 325e3}
MEASURED_COMPILED = 496e3  # in BF16
# FP8, compiled, over BF16 on one H200, whole steps: at 1.3 B with a scale a row, and at a width of 4096.
MEASURED_FP8 = (0.95, 1.33)

CONVOLUTIONS = ("cnn", "diffusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast a whole step may be: a range, and the ceiling that no step reaches."""

    low: float
    high: float
    ceiling: float  # the ratio of the dense peaks
    over: str  # what it is compared with: "fp32", "tf32" where that is what torch does by default, "bf16"
    approximate: bool = False  # a peak is
    measured: bool = False  # elsewhere, and not derived

    @property
    def text(self) -> str:
        """
        >>> Gain(low=1.93, high=4.71, ceiling=7.96, over="fp32").text
        '1.9–4.7×'
        """
        return f"{'~' if self.approximate else ''}{self.low:.1f}–{self.high:.1f}×"


def expected(target: Target, model: ModelFacts, precision: str) -> Gain | None:
    """Of a whole step, uncompiled; None where a peak is not known, and for FP32 itself."""
    if precision == "fp32":
        return None
    if precision == "fp8":
        ratio = target.ratio("fp8", "bf16")
        if ratio is None:
            return None
        low, high = MEASURED_FP8
        return Gain(low=low, high=high, ceiling=ratio.value, over="bf16", measured=True)
    wide = _by_default(target, model)
    ratio = target.ratio(precision, wide)
    if ratio is None:
        return None
    lowest, highest = _share(model)
    return Gain(
        low=_amdahl(lowest, ratio.value),
        high=_amdahl(highest, ratio.value),
        ceiling=ratio.value,
        over=wide,
        approximate=ratio.approximate,
    )


def _by_default(target: Target, model: ModelFacts) -> str:
    """What "FP32" is where nobody set a switch: cuDNN's convolutions take TF32, matrix products do not."""
    return "tf32" if model.kind in CONVOLUTIONS and target.kind == "cuda" and target.has("tf32") else "fp32"


def _share(model: ModelFacts) -> tuple[float, float]:
    work = model.work
    if work is None:
        return ANY_SHARE
    return next((low, high) for limit, low, high in SHARES if work < limit)


def _amdahl(share: float, ratio: float) -> float:
    return 1 / (1 - share + share / ratio)
