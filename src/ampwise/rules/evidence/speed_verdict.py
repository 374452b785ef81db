"""Verdicts by speedup: the customary thresholds in one place."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DEFINITELY", "OPTIONAL", "USE", "SpeedVerdict", "is_noisy", "verdict_of"]

OPTIONAL, USE, DEFINITELY = 1.1, 1.5, 2.5  # speedup over FP32


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
