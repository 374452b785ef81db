"""What torchao's optimizers keep of a weight: two moments, in codes of a few bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODED", "CODED_FROM", "Coded"]

CODED_FROM = (
    4096  # elements: moments of a smaller tensor, or of one that is no multiple of a block, are as the weight is
)
SCALE_BYTES = TABLE_BYTES = 4  # FP32
BITS_OF_A_BYTE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A way to code moments, by torchao's source.

    >>> CODED["adamw8bit"].moment_bytes(2**20, 4) / 2**20
    1.0166015625
    """

    bits: int
    block: int  # elements that share a scale
    table: int  # what codes stand for, once a tensor; 0 where they are numbers themselves

    def codes(self, elements: int) -> bool:
        """Whether moments of a tensor of so many elements are coded."""
        return elements >= CODED_FROM and elements % self.block == 0

    def moment_bytes(self, elements: int, weight_bytes: int) -> int:
        """One moment of a tensor whose elements have so many bytes."""
        if not self.codes(elements):
            return elements * weight_bytes
        codes = elements * self.bits // BITS_OF_A_BYTE
        return codes + elements // self.block * SCALE_BYTES + self.table * TABLE_BYTES

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"two moments of {self.bits} bits, and a scale for every {self.block} of them; as wide as the weights for "
            f"tensors of fewer than {CODED_FROM} elements, or of no multiple of {self.block}"
        )


CODED = {
    "adamw8bit": Coded(bits=8, block=256, table=256),
    "adamw4bit": Coded(bits=4, block=128, table=16),
    "adamwfp8": Coded(bits=8, block=256, table=0),
}
