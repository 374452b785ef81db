"""Two tensors that should be the same, and how far apart they are; what of that rounding explains.

What is explained, and what is not, is a model with three numbers, all of them here. A place (a module, or the code
between modules) hands on the error of what it was given, and each of its operations rounds once, to a side's unit
roundoff u, independently of the others: the error to be expected is the largest that it was given, and u·√operations.
Sums in FP32 add ``SUMMING``, whatever u is. A place whose error is more than ``BEYOND`` times that does something else
than rounding: it subtracts what is nearly equal, is steep where it was evaluated, overflows, or flushes to zero.

A gradient hands on the largest error of those that came before it, and of the values that the forward pass has left it;
where functions have kinks (ReLU, a maximum) the root of the latter, as ``tune.diff.expecting`` says.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BEYOND", "FLOOR_TIMES", "SUMMING", "Compared", "Measured", "finite"]

BEYOND = 4.0  # times what is to be expected
SUMMING = 64 * 2.0**-24  # of FP32's roundings, thousands to a sum, few of them felt
FLOOR_TIMES = 3.0  # what is no more than this above the noise of one side is noise


def finite(value: Any) -> Any:
    """For JSON, which has no infinity: None instead."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two tensors of one shape. Norms are roots of sums of squares, over values that are finite."""

    shape: tuple[int, ...]
    norm_a: float
    norm_b: float
    norm_error: float  # of b − a
    largest_error: float
    largest_at: tuple[int, ...]  # where that is
    largest_a: float  # magnitudes
    largest_b: float
    zeros_a: int
    zeros_b: int
    bad_a: int  # values that are not finite
    bad_b: int
    bad_apart: int = 0  # places where one is not finite, and the other is not the same
    changed: int | None = None  # of whole numbers, how many are others; None of floating point

    @property
    def values(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def apart(self) -> int:
        """Values that are not finite on one side, and not the same on the other; a mask of −inf on both is none."""
        return max(self.bad_apart, abs(self.bad_b - self.bad_a))

    @property
    def relative(self) -> float:
        """‖b − a‖ / ‖a‖; infinite where a value is finite on one side alone, or where only b is something."""
        if self.apart:
            return math.inf
        if not self.norm_error:
            return 0.0
        return self.norm_error / self.norm_a if self.norm_a else math.inf

    @property
    def cosine(self) -> float | None:
        """Of the angle between them; None where one is zero, or a value is finite on one side alone."""
        if not self.norm_a or not self.norm_b or self.apart:
            return None
        a, b, error = self.norm_a, self.norm_b, self.norm_error
        # By the law of cosines, with the squares taken apart: they would cancel.
        return max(-1.0, min(1.0, 1 - (error - (b - a)) / a * ((error + (b - a)) / b) / 2))

    @property
    def snr_db(self) -> float | None:
        """Signal to noise: 20 dB more for each digit; None where there is no noise, or nothing else."""
        relative = self.relative
        return -20 * math.log10(relative) if 0 < relative < math.inf else None

    @property
    def lost_share(self) -> float:
        """Of what is not zero in a, how much is zero in b."""
        present = self.values - self.zeros_a
        return max(0, self.zeros_b - self.zeros_a) / present if present else 0.0

    @property
    def rms(self) -> float:
        """The typical magnitude in a."""
        return self.norm_a / math.sqrt(self.values) if self.values else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what is not finite is None there."""
        return {
            **{name: finite(value) for name, value in asdict(self).items()},
            "shape": list(self.shape),
            "largest_at": list(self.largest_at),
            "relative_error": finite(self.relative),
            "cosine": self.cosine,
            "snr_db": self.snr_db,
            "lost_share": self.lost_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A tensor on both sides, and what error was to be expected of it."""

    part: str = ""  # of what a module returned: "[0]", ".logits"; "" where that is one tensor
    measured: Measured | None = None
    why_not: str = ""  # it could not be measured: "4×8 in a, 3×8 in b"
    given: float = 0.0  # the largest error that went in
    own: float | None = None  # what the roundings of this place add; None: no expectation
    floor: float | None = None  # the error between two runs of a; None: not measured

    @property
    def error(self) -> float:
        """Relative; infinite where the two cannot be compared."""
        return math.inf if self.measured is None else self.measured.relative

    @property
    def flipped(self) -> bool:
        """Whether something that is chosen, not computed, is another: an index, a mask, the size of a part."""
        return bool(self.why_not) or (self.measured is not None and bool(self.measured.changed))

    @property
    def expected(self) -> float | None:
        """The error that rounding explains."""
        return None if self.own is None else self.given + self.own

    @property
    def times(self) -> float | None:
        """How many times that it is."""
        expected = self.expected
        if expected is None or math.isinf(expected):
            return None
        return self.error / expected if expected else (math.inf if self.error else 0.0)

    @property
    def unsteady(self) -> bool:
        """Whether two runs of a are further apart than rounding explains: then the function is not repeatable."""
        expected = self.expected
        return bool(self.floor) and expected is not None and (self.floor or 0.0) > BEYOND * expected

    @property
    def beyond(self) -> bool:
        """Whether it is more than rounding explains, and more than noise."""
        if self.flipped:
            return math.isfinite(self.given) and not self.floor
        times = self.times
        is_more = times is not None and times > BEYOND and self.error > FLOOR_TIMES * (self.floor or 0.0)
        return is_more and not self.unsteady

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "part": self.part,
            **({} if self.measured is None else self.measured.as_dict()),
            "not_compared": self.why_not or None,
            "expected_error": None if self.expected is None else finite(self.expected),
            "times_expected": None if self.times is None else finite(self.times),
            "beyond": self.beyond,
            "noise_floor": None if self.floor is None else finite(self.floor),
        }
