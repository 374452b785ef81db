"""What FP8 layers have lost: values cut off above, and rounded to zero below, at the scales in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NarrowLayers", "NarrowOperand"]

HEADINGS = ("layer", "operand", "format", "scale", "largest", "cut off in", "to zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowOperand:
    """The input, the weight or the gradient of a layer. None: not known."""

    layer: str
    operand: str
    fmt: str
    scale: float | None = None
    amaxes: tuple[float, ...] = ()  # of the last steps, the last first
    steps: int = 0  # that were counted
    cut_off_steps: int = 0  # of those, in how many values were cut off
    cut_off_values: int = 0  # in all of them
    flushed_share: float | None = None  # of the values that were not zero, in the step that was sampled

    @property
    def cut_off_share(self) -> float:
        """Of the steps."""
        return self.cut_off_steps / self.steps if self.steps else 0.0

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        return (
            self.layer,
            self.operand,
            self.fmt,
            "-" if self.scale is None else f"{self.scale:g}",
            f"{self.amaxes[0]:.3g}" if self.amaxes else "-",
            f"{self.cut_off_steps} of {self.steps} steps" if self.steps else "-",
            "-" if self.flushed_share is None else f"{self.flushed_share:.1%}",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowLayers:
    """All FP8 layers of a model, as of a step."""

    step: int
    operands: tuple[NarrowOperand, ...]

    def __str__(self) -> str:
        rows = [HEADINGS, *(operand.cells() for operand in self.operands)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
