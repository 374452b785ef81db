"""The plan of what ``pad_`` pads in a model, what it leaves, and why; made before anything changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ampwise.errors import BadInput
from ampwise.finding.terminal import printable
from ampwise.tune.align.alignment import better_size, multiple_for
from ampwise.tune.align.layers import KEPT, MASKED, SLICED

__all__ = ["PaddedWeight", "Padding", "PaddingRequest", "UnpaddedLayer"]

LOGITS = (SLICED, MASKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRequest:
    """What to pad, and to what sizes."""

    precision: str = "bf16"
    to: int | None = None
    only: tuple[str, ...] = ()  # names or globs; empty: all layers that gain
    head: str | None = None  # the layer that makes the logits
    logits: str = SLICED

    def __post_init__(self) -> None:
        multiple_for(self.precision, self.to)
        if self.logits not in LOGITS:
            raise BadInput(f"pad_(logits={self.logits!r}): expected 'sliced' or 'masked'.")

    def better(self, size: int) -> int:
        """Return the size to pad to."""
        return better_size(size, self.precision, self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedWeight:
    """A weight to pad, with the layers that use it."""

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...] = field(repr=False, compare=False)
    before: tuple[int, int]  # outputs and inputs of a linear layer; rows and columns of an embedding
    after: tuple[int, int]
    gives: str
    tied_by_code: bool = False  # an embedding whose weight the model's code multiplies with

    @property
    def how(self) -> str:
        """What happens to inputs and outputs."""
        if self.gives == KEPT:
            return "stays padded up to the next layer"
        if self.before[0] == self.after[0]:
            return "takes padded inputs"
        return "logits masked" if self.gives == MASKED else "outputs sliced"

    @property
    def added(self) -> int:
        """Number of padding elements in the weight."""
        return self.after[0] * self.after[1] - self.before[0] * self.before[1]

    def as_dict(self) -> dict[str, Any]:
        parts = {"names": list(self.names), "before": list(self.before), "after": list(self.after)}
        return parts | {"how": self.how, "added": self.added}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpaddedLayer:
    """A misaligned layer that is left as it is."""

    name: str
    size: tuple[int, int]
    why: str
    needs_head: bool = False  # it can be padded if named as the head

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "size": list(self.size), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What ``pad_`` has done; ``print`` shows it."""

    padded: tuple[PaddedWeight, ...]
    left: tuple[UnpaddedLayer, ...]

    def __str__(self) -> str:
        if not self.padded and not self.left:
            return "nothing to pad: every size is aligned"
        added = sum(step.added for step in self.padded)
        lines = [f"{len(self.padded)} weights padded, {added:,} zeros added"]
        for step in self.padded:
            sizes = " → ".join("×".join(map(str, size)) for size in (step.before, step.after))
            lines.append(f"  {_named(*step.names)}: {sizes}, {step.how}")
        lines += [f"  {_named(each.name)}: left at {'×'.join(map(str, each.size))}: {each.why}" for each in self.left]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"padded": [step.as_dict() for step in self.padded], "left": [each.as_dict() for each in self.left]}


def _named(*names: str) -> str:
    return printable(" = ".join(name or "the model" for name in names))
