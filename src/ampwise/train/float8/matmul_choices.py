"""Which matmuls of each layer ``Fp8("auto")`` runs in FP8, and why, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ampwise.train.float8.recipe import MATMULS
from ampwise.train.precision.policy_table import brace_ranges

__all__ = ["Fp8Choices", "MatmulChoice"]

HEADINGS = ("layer", "", "in fp8", "speed-up", *(f"error {each}" for each in MATMULS), "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulChoice:
    """Which matmuls of a layer run in FP8, and why."""

    name: str
    matmuls: tuple[str, ...]  # in FP8
    errors: tuple[float | None, ...]  # of each in FP8, relative to BF16; None: it did not run
    gain: float | None  # of the layer, forward and backward, over BF16; None: nothing could be timed
    timing: str  # the times behind it
    excluded: tuple[str, ...] = ()  # matmuls whose error is above the limit
    lost: str = ""  # what the most important of their operands loses

    def why(self, limit: float) -> str:
        """Return a sentence without numbers that differ from layer to layer."""
        above = f"; {', '.join(self.excluded)} not: error above {limit:g}" if self.excluded else ""
        return f"{self.timing}{above}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Choices:
    """What ``Fp8("auto")`` has decided; ``print`` shows a line for each group of layers."""

    limit: float
    decided_after: int | None  # steps; None: not yet
    layers: tuple[MatmulChoice, ...]

    def __repr__(self) -> str:
        return f"<Fp8Choices of {len(self.layers)} layers, decided after {self.decided_after} steps>"

    def __str__(self) -> str:
        if self.decided_after is None:
            return "not decided yet: the first step measures"
        groups: dict[tuple[str, tuple[str, ...]], list[MatmulChoice]] = {}
        for layer in self.layers:
            pattern = ".".join("#" if part.isdecimal() else part for part in layer.name.split("."))
            groups.setdefault((pattern, layer.matmuls), []).append(layer)
        rows = [HEADINGS, *(self._cells(pattern, layers) for (pattern, _), layers in groups.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"decided after step {self.decided_after:,}; errors relative to BF16, up to {self.limit:g} in FP8"]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
            lines += ["  ".join(cells).rstrip()]
        return "\n".join(lines)

    def _cells(self, pattern: str, layers: Sequence[MatmulChoice]) -> tuple[str, ...]:
        """Return a line for like layers: the smallest gain, and the largest errors."""
        first = layers[0]
        gains = [layer.gain for layer in layers if layer.gain is not None]
        errors = []
        for place in range(len(MATMULS)):
            known = [error for layer in layers if (error := layer.errors[place]) is not None]
            errors.append(f"{max(known):.3f}" if known else "-")
        # Numbers are listed for the last place where they differ; names with several are shown as a pattern.
        numbers = [[part for part in layer.name.split(".") if part.isdecimal()] for layer in layers]
        name = first.name if len(layers) == 1 else pattern
        if len(layers) > 1 and len(numbers[0]) == 1:
            name = pattern.replace("#", brace_ranges(sorted(int(each[0]) for each in numbers)))
        excluded = [each for each in MATMULS if any(each in layer.excluded for layer in layers)]
        reasons = [f"{', '.join(excluded)}: error above {self.limit:g}"] if excluded else []
        reasons += dict.fromkeys(layer.lost for layer in layers if layer.lost)
        if not first.matmuls and gains and len(excluded) < len(MATMULS):
            reasons.append("not faster")
        if not gains:
            reasons.append(first.timing)
        return (
            name,
            f"×{len(layers)}" if len(layers) > 1 else "",
            "+".join(first.matmuls) or "none",
            f"{min(gains):.2f}x" if gains else "-",
            *errors,
            "; ".join(reasons) or "faster, and errors within the limit",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        layers = [layer.as_dict() for layer in self.layers]
        return {"limit": self.limit, "decided_after": self.decided_after, "layers": layers}
