"""FP32 to BF16, which is its upper half: rounded by chance, or to nearest with the rest kept.

Both work on the bits of FP32 values in place, by integer operations that are exact on every device, and both leave
alone what BF16 holds already: a step that was skipped changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Noise", "join_", "round_", "split_"]

LOWER_BITS = 16
UPPER_HALF = -(1 << LOWER_BITS)  # a mask
HALF = 1 << (LOWER_BITS - 1)  # of a step of BF16
NAN = 0x7FC00000


class Noise:
    """Random bits from a stream of our own, alike on every rank: they depend on how many were drawn before, only."""

    def __init__(self, drawn: int = 0) -> None:
        self.drawn = drawn  # times
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, values: Tensor) -> Tensor:
        """16 random bits for each value, as integers."""
        generator = self._generators.setdefault(values.device, torch.Generator(values.device))
        generator.manual_seed(self.drawn)
        self.drawn += 1
        return torch.empty_like(values, dtype=torch.int32).random_(0, 1 << LOWER_BITS, generator=generator)


def round_(values: Tensor, noise: Tensor) -> Tensor:
    """To one of the two neighbours in BF16, to the nearer one more often: on average, to the value itself.

    ``values`` are FP32 and stay so; ``noise`` is what ``Noise.like`` gave.

    >>> values = torch.tensor([1.0, 1.0 + 2**-8])
    >>> round_(values, torch.tensor([65535, 65535], dtype=torch.int32))
    tensor([1.0000, 1.0078])
    """
    bits, nans = values.view(torch.int32), values.isnan()
    bits.add_(noise).bitwise_and_(UPPER_HALF).masked_fill_(nans, NAN)  # whose bits may overflow, or be all below
    return values


def split_(values: Tensor) -> Tensor:
    """Round to nearest, and return what is left of each value: the lower half of its bits, exactly.

    >>> values = torch.tensor([1.0 + 2**-12])
    >>> rest = split_(values)
    >>> values
    tensor([1.])
    >>> float(join_(values, rest)) == 1.0 + 2**-12
    True
    """
    bits, nans = values.view(torch.int32), values.isnan()
    rest = bits.to(torch.int16).masked_fill_(nans, 0)
    bits.add_(HALF).bitwise_and_(UPPER_HALF).masked_fill_(nans, NAN)
    return rest


def join_(values: Tensor, rest: Tensor) -> Tensor:
    """Undo ``split_``: FP32 values that BF16 holds, and the rest of each, become what they were.

    A value may have been written to since: it is less than a step of BF16 away from itself then. From a zero nothing
    can be taken away: there the bits would become those of a NaN.
    """
    values.view(torch.int32).add_(torch.where(values == 0, rest.clamp(min=0), rest))
    return values
