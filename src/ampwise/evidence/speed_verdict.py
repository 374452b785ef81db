"""From how many times as fast to what is to be done: the thresholds that people use, in one place."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DEFINITELY", "OPTIONAL", "USE", "Verdict", "is_noisy", "verdict_of"]

OPTIONAL, USE, DEFINITELY = 1.1, 1.5, 2.5  # times as fast as FP32


class Verdict(StrEnum):
    """What is to be done about a precision, by the thresholds that people use."""

    NOISE = "noise"
    STAY = "stay"
    OPTIONAL = "optional"
    USE = "use"
    DEFINITELY = "definitely"


def verdict_of(ratio: float, noise: float | None = None) -> Verdict:
    """
    >>> [str(verdict_of(ratio)) for ratio in (0.8, 1.1, 1.5, 2.5, 2.6)]
    ['stay', 'optional', 'use', 'use', 'definitely']
    >>> verdict_of(1.15, noise=0.2)
    <Verdict.NOISE: 'noise'>
    """
    if noise is not None and max(ratio, 1 / ratio) <= 1 + noise:
        return Verdict.NOISE
    if ratio < OPTIONAL:
        return Verdict.STAY
    if ratio < USE:
        return Verdict.OPTIONAL
    return Verdict.USE if ratio <= DEFINITELY else Verdict.DEFINITELY


def is_noisy(noise: float | None) -> bool:
    """Whether two runs of the same differ by more than would be a reason to change.

    >>> is_noisy(0.02), is_noisy(0.2), is_noisy(None)
    (False, True, False)
    """
    return noise is not None and noise > OPTIONAL - 1
