"""Round FP32 to BF16, its upper half: stochastically, or to nearest with the remainder kept.

Both work in place on the bits of FP32 values, with integer operations that are exact on every device. Both leave values
unchanged that BF16 can represent, so that a skipped step changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RoundingNoise", "join_bf16_", "split_bf16_", "stochastic_round_"]

LOWER_BITS = 16
UPPER_HALF = -(1 << LOWER_BITS)  # a mask
HALF = 1 << (LOWER_BITS - 1)  # of a step of BF16
NAN = 0x7FC00000


class RoundingNoise:
    """Random bits from a separate stream, the same on every rank: they depend only on the number of earlier draws."""

    def __init__(self, drawn: int = 0) -> None:
        self.drawn = drawn  # number of draws so far, used as the seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, values: Tensor) -> Tensor:
        """Return 16 random bits for each value, as integers."""
        generator = self._generators.setdefault(values.device, torch.Generator(values.device))
        generator.manual_seed(self.drawn)
        self.drawn += 1
        return torch.empty_like(values, dtype=torch.int32).random_(0, 1 << LOWER_BITS, generator=generator)


def stochastic_round_(values: Tensor, noise: Tensor) -> Tensor:
    """Round FP32 values stochastically to BF16: to one of the two neighbours, unbiased on average.

    The tensor stays FP32; ``noise`` comes from ``RoundingNoise.like``.

    >>> values = torch.tensor([1.0, 1.0 + 2**-8])
    >>> stochastic_round_(values, torch.tensor([65535, 65535], dtype=torch.int32))
    tensor([1.0000, 1.0078])
    """
    bits, nans = values.view(torch.int32), values.isnan()
    bits.add_(noise).bitwise_and_(UPPER_HALF).masked_fill_(nans, NAN)  # adding could turn a NaN into another value
    return values


def split_bf16_(values: Tensor) -> Tensor:
    """Round FP32 values to BF16, to nearest, and return the exact remainder: the lower half of the bits.

    >>> values = torch.tensor([1.0 + 2**-12])
    >>> rest = split_bf16_(values)
    >>> values
    tensor([1.])
    >>> float(join_bf16_(values, rest)) == 1.0 + 2**-12
    True
    """
    bits, nans = values.view(torch.int32), values.isnan()
    rest = bits.to(torch.int16).masked_fill_(nans, 0)
    bits.add_(HALF).bitwise_and_(UPPER_HALF).masked_fill_(nans, NAN)
    return rest


def join_bf16_(values: Tensor, rest: Tensor) -> Tensor:
    """Undo ``split_bf16_``: add the remainders to FP32 values that hold BF16 numbers.

    If a value was overwritten since, the result is less than one BF16 step away from it. A negative remainder is
    ignored for a zero, whose bits would become those of a NaN.
    """
    values.view(torch.int32).add_(torch.where(values == 0, rest.clamp(min=0), rest))
    return values
