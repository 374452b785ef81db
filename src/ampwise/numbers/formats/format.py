"""Format and BlockFormat: a number format as its bit counts, with every limit derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# What ``as_dict`` returns, in order.
_SCALAR_KEYS = (
    "name", "title", "aliases", "torch_dtype", "bits", "bytes_per_value", "signed", "exponent_bits", "mantissa_bits",
    "bias", "codes", "infinities", "nans", "max", "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits",
    "flush_exponent", "overflow_threshold", "overflow_at_threshold", "needs_loss_scale", "since", "training",
)  # fmt: skip
_BLOCK_KEYS = (
    "name", "title", "aliases", "element", "scale", "block_size", "tensor_scale", "bits_per_value", "bytes_per_value",
    "max", "smallest", "needs_loss_scale", "since", "training",
)  # fmt: skip
_FP32_MAX = (2 - 2.0**-23) * 2.0**127  # of a tensor's scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format.

    >>> from ampwise import find_format
    >>> fp16 = find_format("fp16")
    >>> fp16.max, fp16.smallest_normal, fp16.smallest_subnormal
    (65504.0, 6.103515625e-05, 5.960464477539063e-08)
    """

    name: str
    title: str  # as a person writes it: "FP8 E4M3"
    exponent_bits: int
    mantissa_bits: int  # stored bits, not the implicit one
    bias: int
    reserved_codes: int  # top positive codes that mean infinity or NaN
    infinities: bool  # is the lowest reserved code an infinity?
    signed: bool = True
    nan_at_negative_zero: bool = False  # the FNUZ formats: negative zero's code is the NaN
    subnormals: bool = True  # False only if the lowest exponent field is a normal one and there is no zero
    storage_bits: int | None = None  # if a value is stored in more bits than it has: TF32 in 32
    aliases: tuple[str, ...] = ()
    torch_dtype: str | None = None  # the name under torch., where torch has one
    since: str = ""  # the hardware that first multiplied matrices in it
    training: str = ""  # what it means for training, in one sentence

    def __repr__(self) -> str:
        bits = f"{self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits"
        return f"<Format {self.name}: {bits}, max {self.max:.6g}, smallest {self.smallest:.3g}>"

    @property
    def bits(self) -> int:
        """Bits that carry information."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def bytes_per_value(self) -> float:
        """Memory one value takes."""
        return (self.storage_bits or self.bits) / 8

    @property
    def codes(self) -> int:
        """How many bit patterns there are."""
        return 1 << self.bits

    @property
    def max(self) -> float:
        """The largest finite value."""
        exponent, mantissa = divmod(self._top_code, 2**self.mantissa_bits)
        return math.ldexp(1 + mantissa / 2**self.mantissa_bits, exponent - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest value held with all mantissa bits."""
        return math.ldexp(1.0, self.lowest_exponent)

    @property
    def smallest_subnormal(self) -> float | None:
        """The smallest value above zero, held with one bit; None where the format has no subnormals."""
        return math.ldexp(1.0, self.lowest_exponent - self.mantissa_bits) if self.subnormals else None

    @property
    def smallest(self) -> float:
        """The smallest positive value of any kind."""
        return self.smallest_subnormal or self.smallest_normal

    @property
    def epsilon(self) -> float:
        """The gap between 1 and the next value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def decimal_digits(self) -> float:
        """How many decimal digits a normal value carries."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def nans(self) -> bool:
        """Whether it can hold NaN."""
        return self.reserved_codes > int(self.infinities) or self.nan_at_negative_zero

    @property
    def lowest_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return (1 if self.subnormals else 0) - self.bias

    @property
    def flush_exponent(self) -> int | None:
        """Magnitudes at or below ``2**flush_exponent`` round to zero; None where there is no zero.

        Half the smallest subnormal is a tie, and ties go to the even neighbour, which is zero.
        """
        return self.lowest_exponent - self.mantissa_bits - 1 if self.subnormals else None

    @property
    def overflow_threshold(self) -> float:
        """Halfway from ``max`` to where the next value would be; see ``overflow_at_threshold``."""
        half_gap_exponent = self.overflow_binade - self.mantissa_bits - 1
        # For fp64 the threshold itself is not representable as a float.
        return self.max + math.ldexp(1.0, half_gap_exponent) if self.mantissa_bits < 52 else math.inf

    @property
    def overflow_binade(self) -> int:
        """The ``e`` with ``2**e < overflow_threshold < 2**(e+1)``: the limit always lies inside a binade."""
        return math.frexp(self.max)[1] - 1

    @property
    def overflow_at_threshold(self) -> bool:
        """Whether the tie at ``overflow_threshold`` overflows: it does if ``max`` is the odd neighbour.

        Without mantissa bits every significand is 1, which is odd, and ties always go up.
        """
        return self.mantissa_bits == 0 or self._top_code % 2 == 1

    @property
    def needs_loss_scale(self) -> bool:
        """Whether typical gradients underflow: they go down to about 2**-40, FP16 only to 2**-24."""
        return self.smallest > 2.0**-60

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. What does not exist is None, such as FP64's threshold."""
        return {"kind": "scalar", **{name: getattr(self, name) for name in _SCALAR_KEYS}} | {
            "aliases": list(self.aliases),
            "decimal_digits": round(self.decimal_digits, 2),
            "overflow_threshold": self.overflow_threshold if math.isfinite(self.overflow_threshold) else None,
        }

    @property
    def _top_code(self) -> int:
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - self.reserved_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Small elements that share a scale, block by block along the last dimension.

    >>> from ampwise import find_format
    >>> mxfp8 = find_format("mxfp8")
    >>> mxfp8.element.name, mxfp8.scale.name, mxfp8.block_size, mxfp8.bits_per_value
    ('e4m3fn', 'e8m0', 32, 8.25)
    """

    name: str
    title: str
    element: Format
    scale: Format
    block_size: int
    tensor_scale: bool = False  # a second, FP32 scale for the whole tensor (NVFP4)
    # Double a power-of-two scale if the block's largest value would saturate. OCP's rule does not, and cuts up to an
    # eighth off that value in E4M3, a quarter in E2M1.
    scales_up: bool = False
    # With a tensor scale: the block's largest value becomes the element 6 or 4, whichever loses less. E2M1 has no value
    # between them, so that a block with many values just below its largest loses most.
    four_over_six: bool = False
    aliases: tuple[str, ...] = ()
    since: str = ""
    training: str = ""

    def __repr__(self) -> str:
        scale = f"{self.scale.name} scale{' and an fp32 scale per tensor' if self.tensor_scale else ''}"
        return f"<BlockFormat {self.name}: blocks of {self.block_size} × {self.element.name} with one {scale}>"

    @property
    def bits_per_value(self) -> float:
        """Bits per value, including its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value, including its share of the block's scale."""
        return self.bits_per_value / 8

    @property
    def max(self) -> float:
        """The largest value: the largest element under the largest scale."""
        return self.element.max * self.scale.max

    @property
    def smallest(self) -> float:
        """The smallest value above zero, in a block whose scale is the smallest."""
        return self.element.smallest * self.scale.smallest

    @property
    def overflow_threshold(self) -> float:
        """Beyond this no scale brings a value into the element's range."""
        tensor_scale = _FP32_MAX if self.tensor_scale else 1.0
        return self.element.overflow_threshold * self.scale.max * tensor_scale

    @property
    def overflow_binade(self) -> int:
        """The ``e`` with ``2**e < overflow_threshold <= 2**(e+1)``."""
        return binade_of(self.overflow_threshold)

    @property
    def overflow_at_threshold(self) -> bool:
        """Whether the tie at ``overflow_threshold`` overflows, as for its elements."""
        return self.element.overflow_at_threshold

    @property
    def needs_loss_scale(self) -> bool:
        """Always False: each block has its own scale."""
        return False

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        parts = {"aliases": list(self.aliases), "element": self.element.name, "scale": self.scale.name}
        return {"kind": "block", **{name: getattr(self, name) for name in _BLOCK_KEYS}} | parts


def binade_of(magnitude: float) -> int:
    """Return the ``e`` with ``2**e < magnitude <= 2**(e+1)``.

    >>> binade_of(1.0), binade_of(1.5), binade_of(2.0), binade_of(2.5)
    (-1, 0, 0, 1)
    """
    mantissa, exponent = math.frexp(magnitude)
    return exponent - 2 if mantissa == 0.5 else exponent - 1


def short_number(value: float | None) -> str:
    """Return a number with all its digits if they are few, else with three.

    >>> [short_number(value) for value in (65504.0, 6.103515625e-05, 0.0625, 3.3895313892515355e38, None)]
    ['65504', '6.10e-05', '0.0625', '3.39e+38', '-']
    """
    if value is None:
        return "-"
    short = f"{value:g}"
    return short if float(short) == value and len(short) <= 7 and "e" not in short else f"{value:.2e}"
