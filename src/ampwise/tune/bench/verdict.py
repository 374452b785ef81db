"""When a speedup is worth it: thresholds, and words for the kinds of work in a step."""

from __future__ import annotations

from enum import StrEnum

OPTIONAL, USE, DEFINITELY = 1.1, 1.5, 2.5  # speedup over FP32
# Kinds of work in a step, and those that are limited by memory bandwidth, not by the tensor cores.
KIND_WORDS = {
    "matrix": "matmuls",
    "attention": "attention",
    "elementwise": "norms and elementwise",
    "casts": "casts",
    "optimizer": "clip and optimizer",
    "copies": "copies",
    "other": "other",
    "idle": "idle",
}
MEMORY_BOUND = ("elementwise", "casts", "optimizer", "copies")


class SpeedVerdict(StrEnum):
    """Recommendation for a precision, by the customary thresholds."""

    NOISE = "noise"
    STAY = "stay"
    OPTIONAL = "optional"
    USE = "use"
    DEFINITELY = "definitely"


def verdict_of(ratio: float, noise: float | None = None) -> SpeedVerdict:
    """
    >>> [str(verdict_of(ratio)) for ratio in (0.8, 1.1, 1.5, 2.5, 2.6)]
    ['stay', 'optional', 'use', 'use', 'definitely']
    >>> verdict_of(1.15, noise=0.2)
    <SpeedVerdict.NOISE: 'noise'>
    """
    if noise is not None and max(ratio, 1 / ratio) <= 1 + noise:
        return SpeedVerdict.NOISE
    if ratio < OPTIONAL:
        return SpeedVerdict.STAY
    if ratio < USE:
        return SpeedVerdict.OPTIONAL
    return SpeedVerdict.USE if ratio <= DEFINITELY else SpeedVerdict.DEFINITELY


def is_noisy(noise: float | None) -> bool:
    """Return whether two runs of the same precision differ by more than a worthwhile gain.

    >>> is_noisy(0.02), is_noisy(0.2), is_noisy(None)
    (False, True, False)
    """
    return noise is not None and noise > OPTIONAL - 1


def ratio_text(ratio: float) -> str:
    """
    >>> ratio_text(6.0214), ratio_text(0.031), ratio_text(14.26)
    ('6.02×', '0.03×', '14.3×')
    """
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×"
