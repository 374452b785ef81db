"""What is padded in a model, what is not, and why: made before anything is touched, and handed to who asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ampwise.errors import BadInput
from ampwise.evidence.alignment import better, multiple_for
from ampwise.printers.terminal import printable
from ampwise.tune.align.layers import KEPT, MASKED, SLICED

__all__ = ["Left", "Padding", "Step", "Wish"]

LOGITS = (SLICED, MASKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be padded, and to what."""

    precision: str = "bf16"
    to: int | None = None
    only: tuple[str, ...] = ()  # names or globs; none: whatever gains
    head: str | None = None  # who makes the logits
    logits: str = SLICED

    def __post_init__(self) -> None:
        multiple_for(self.precision, self.to)
        if self.logits not in LOGITS:
            raise BadInput(f"pad_(logits={self.logits!r}): expected is 'sliced' or 'masked'.")

    def better(self, size: int) -> int:
        """The size that is wanted instead."""
        return better(size, self.precision, self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One weight that is padded, with the layers that have it."""

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...] = field(repr=False, compare=False)
    before: tuple[int, int]  # outputs and inputs of a linear layer; rows and columns of an embedding
    after: tuple[int, int]
    gives: str
    tied_by_code: bool = False  # an embedding whose weight the model's code multiplies with

    @property
    def how(self) -> str:
        """What becomes of inputs and outputs."""
        if self.gives == KEPT:
            return "stays padded up to the next layer"
        if self.before[0] == self.after[0]:
            return "takes padded inputs"
        return "logits masked" if self.gives == MASKED else "outputs sliced"

    @property
    def added(self) -> int:
        """Values of the weight that are padding."""
        return self.after[0] * self.after[1] - self.before[0] * self.before[1]

    def as_dict(self) -> dict[str, Any]:
        parts = {"names": list(self.names), "before": list(self.before), "after": list(self.after)}
        return parts | {"how": self.how, "added": self.added}


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A layer that misses the alignment and stays as it is."""

    name: str
    size: tuple[int, int]
    why: str
    needs_head: bool = False  # it may be padded if it is named as the head

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "size": list(self.size), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What ``pad_`` has done, as ``print`` shows it."""

    padded: tuple[Step, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        if not self.padded and not self.left:
            return "nothing to pad: every size lies well"
        added = sum(step.added for step in self.padded)
        lines = [f"{len(self.padded)} weights padded, {added:,} zeros added"]
        for step in self.padded:
            sizes = " → ".join("×".join(map(str, size)) for size in (step.before, step.after))
            lines.append(f"  {_named(*step.names)}: {sizes}, {step.how}")
        lines += [f"  {_named(each.name)}: left at {'×'.join(map(str, each.size))}: {each.why}" for each in self.left]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"padded": [step.as_dict() for step in self.padded], "left": [each.as_dict() for each in self.left]}


def _named(*names: str) -> str:
    return printable(" = ".join(name or "the model" for name in names))
