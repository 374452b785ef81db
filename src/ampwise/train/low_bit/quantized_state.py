"""Size of the state of torchao's optimizers: two quantized moments per weight, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIN_QUANTIZED_ELEMENTS", "QUANTIZED_OPTIMIZERS", "QuantizedMoments"]

MIN_QUANTIZED_ELEMENTS = (
    4096  # elements: moments of smaller tensors, or of those that are not a multiple of a block, are not quantized
)
SCALE_BYTES = TABLE_BYTES = 4  # FP32
BITS_OF_A_BYTE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMoments:
    """How torchao quantizes moments, according to its source.

    >>> QUANTIZED_OPTIMIZERS["adamw8bit"].moment_bytes(2**20, 4) / 2**20
    1.0166015625
    """

    bits: int
    block: int  # elements that share a scale
    table: int  # entries of the lookup table per tensor; 0 if codes are floating-point numbers

    def codes(self, elements: int) -> bool:
        """Return whether the moments of a tensor with this many elements are quantized."""
        return elements >= MIN_QUANTIZED_ELEMENTS and elements % self.block == 0

    def moment_bytes(self, elements: int, weight_bytes: int) -> int:
        """Return the bytes of one moment of a tensor with ``weight_bytes`` per element."""
        if not self.codes(elements):
            return elements * weight_bytes
        codes = elements * self.bits // BITS_OF_A_BYTE
        return codes + elements // self.block * SCALE_BYTES + self.table * TABLE_BYTES

    @property
    def text(self) -> str:
        """Description in words."""
        return (
            f"two moments of {self.bits} bits, and a scale for every {self.block} of them; in the weights' dtype for "
            f"tensors of fewer than {MIN_QUANTIZED_ELEMENTS} elements, or not a multiple of {self.block}"
        )


QUANTIZED_OPTIMIZERS = {
    "adamw8bit": QuantizedMoments(bits=8, block=256, table=256),
    "adamw4bit": QuantizedMoments(bits=4, block=128, table=16),
    "adamwfp8": QuantizedMoments(bits=8, block=256, table=0),
}
