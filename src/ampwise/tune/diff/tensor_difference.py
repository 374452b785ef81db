"""Two tensors that should be equal: how far apart they are, and how much of that rounding explains.

What rounding explains is a model with three constants, defined here. A location (a module, or the code between modules)
passes on the error of its inputs, and each of its operations rounds once, by a side's unit roundoff u, independently:
the expected error is the largest input error plus u * sqrt(operations). Sums in FP32 add ``SUMMING``, whatever u is. A
location whose error is more than ``BEYOND`` times that does more than round: it subtracts nearly equal values, is steep
at its input, overflows, or flushes to zero.

A gradient passes on the largest error of the gradients before it and of the forward values it uses; if functions have
kinks (ReLU, a maximum), the square root of the latter, as described in ``expected_errors``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

BEYOND = 4.0  # times the expected error
SUMMING = 64 * 2.0**-24  # FP32 rounding in a sum of thousands of terms
MANY = 16  # values: with fewer, a direction means little
FLOOR_TIMES = 3.0  # times the noise of one side: up to this, a difference is noise


def finite_or_none(value: Any) -> Any:
    """Return None for a number that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Measurements of two tensors of one shape. Norms are root sums of squares over the finite values."""

    shape: tuple[int, ...]
    norm_a: float
    norm_b: float
    norm_error: float  # of b − a
    largest_error: float
    largest_at: tuple[int, ...]  # its index
    largest_a: float  # magnitudes
    largest_b: float
    zeros_a: int
    zeros_b: int
    bad_a: int  # values that are not finite
    bad_b: int
    bad_apart: int = 0  # positions where one is not finite and the other differs
    changed: int | None = None  # integers that differ; None for floating point

    @property
    def values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def apart(self) -> int:
        """Values that are not finite on one side and differ on the other; a mask of −inf on both does not count."""
        return max(self.bad_apart, abs(self.bad_b - self.bad_a))

    @property
    def relative(self) -> float:
        """norm(b - a) / norm(a); infinite if a value is finite on one side only, or a is zero and b is not."""
        if self.apart:
            return math.inf
        if not self.norm_error:
            return 0.0
        return self.norm_error / self.norm_a if self.norm_a else math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between them; None if one is zero, or a value is finite on one side only."""
        if not self.norm_a or not self.norm_b or self.apart:
            return None
        a, b, error = self.norm_a, self.norm_b, self.norm_error
        # By the law of cosines, factored because the squares would cancel.
        return max(-1.0, min(1.0, 1 - (error - (b - a)) / a * ((error + (b - a)) / b) / 2))

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio: 20 dB per digit; None without noise, or with nothing but noise."""
        relative = self.relative
        return -20 * math.log10(relative) if 0 < relative < math.inf else None

    @property
    def lost_share(self) -> float:
        """Fraction of a's nonzero values that are zero in b."""
        present = self.values - self.zeros_a
        return max(0, self.zeros_b - self.zeros_a) / present if present else 0.0

    @property
    def rms(self) -> float:
        """Typical magnitude in a."""
        return self.norm_a / math.sqrt(self.values) if self.values else 0.0

    @property
    def only_length_differs(self) -> bool:
        """Whether the error is a pure factor."""
        if self.cosine is None or self.values < MANY:
            return False
        return math.sqrt(max(0.0, 2 - 2 * self.cosine)) <= self.relative / BEYOND

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with None for numbers that are not finite."""
        return {
            **{name: finite_or_none(value) for name, value in asdict(self).items()},
            "shape": list(self.shape),
            "largest_at": list(self.largest_at),
            "relative_error": finite_or_none(self.relative),
            "cosine": self.cosine,
            "snr_db": self.snr_db,
            "lost_share": self.lost_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """A tensor on both sides, and its expected error."""

    part: str = ""  # part of a module's output: "[0]", ".logits"; "" for a single tensor
    measured: TensorDifference | None = None
    why_not: str = ""  # why it could not be measured: "4×8 in a, 3×8 in b"
    given: float = 0.0  # the largest input error
    own: float | None = None  # error added by rounding here; None: unknown
    floor: float | None = None  # the error between two runs of a; None: not measured

    @property
    def error(self) -> float:
        """Relative error; infinite if the two cannot be compared."""
        return math.inf if self.measured is None else self.measured.relative

    @property
    def flipped(self) -> bool:
        """Whether a discrete value differs: an index, a mask, a split size."""
        return bool(self.why_not) or (self.measured is not None and bool(self.measured.changed))

    @property
    def expected(self) -> float | None:
        """Error that rounding explains."""
        return None if self.own is None else self.given + self.own

    @property
    def times(self) -> float | None:
        """Ratio of the error to the expected error."""
        expected = self.expected
        if expected is None or math.isinf(expected):
            return None
        return self.error / expected if expected else (math.inf if self.error else 0.0)

    @property
    def unsteady(self) -> bool:
        """Whether two runs of a differ by more than rounding explains: the function is not repeatable."""
        expected = self.expected
        return bool(self.floor) and expected is not None and (self.floor or 0.0) > BEYOND * expected

    @property
    def beyond(self) -> bool:
        """Whether the error exceeds both rounding and noise."""
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
            "expected_error": None if self.expected is None else finite_or_none(self.expected),
            "times_expected": None if self.times is None else finite_or_none(self.times),
            "beyond": self.beyond,
            "noise_floor": None if self.floor is None else finite_or_none(self.floor),
        }
