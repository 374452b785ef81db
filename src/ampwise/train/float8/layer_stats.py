"""Values that FP8 layers lost at their scales: saturated, or rounded to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Float8LayerStats", "Float8OperandStats"]

HEADINGS = ("layer", "operand", "format", "scale", "largest", "saturated in", "to zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8OperandStats:
    """The input, weight or gradient of a layer. None: unknown."""

    layer: str
    operand: str
    fmt: str
    scale: float | None = None
    amaxes: tuple[float, ...] = ()  # of recent steps, newest first
    steps: int = 0  # counted
    cut_off_steps: int = 0  # counted steps with saturated values
    cut_off_values: int = 0  # saturated values in all of them
    flushed_share: float | None = None  # fraction of the nonzero values, in the sampled step

    @property
    def cut_off_share(self) -> float:
        """Fraction of steps with saturated values."""
        return self.cut_off_steps / self.steps if self.steps else 0.0

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
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
class Float8LayerStats:
    """All FP8 layers of a model at one step."""

    step: int
    operands: tuple[Float8OperandStats, ...]

    def __repr__(self) -> str:
        return f"<Float8LayerStats of {len(self.operands)} operands at step {self.step}>"

    def __str__(self) -> str:
        rows = [HEADINGS, *(operand.cells() for operand in self.operands)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
