"""The tape: the operations of a step in their order, and which tensors went from one to another.

Tensors themselves are not kept, but what they held (a slot of ``Ranges``) and in whose memory (``Storage``): an
operation may write over its input, or into a part of another tensor's memory, and a view of it is read later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampwise.evidence.conduct import Site
from ampwise.trace.ranges import Ranges

__all__ = ["Given", "Op", "Storage", "Tape", "Written"]


class Written(NamedTuple):
    """An operation has put something into a memory."""

    op: int
    slot: int


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory, from when it was first seen."""

    leaf: Tensor | None = None  # it was there before: a weight, the batch, a constant
    address: StorageWeakRef | None = None  # held, or a constant that is made later would be taken for this
    writers: list[Written] = field(default_factory=list)
    measured: dict[object, tuple[int, int]] = field(default_factory=dict)  # views: writers at the time, slot


class Given(NamedTuple):
    """What an operation has read."""

    storage: Storage
    writers: int  # how many operations had written there by then
    slot: int


@dataclass(slots=True, eq=False)
class Op:
    """An operation that was run."""

    index: int
    name: str  # "aten.addmm.default"
    dtype: str  # of its first result
    inputs: tuple[Given, ...]
    outputs: tuple[int, ...]  # slots
    scalars: tuple[float, ...] = ()  # numbers among its arguments
    site: Site = field(default_factory=Site)
    live: bool = True  # the line was running; else it is the one whose derivative this is
    phase: str = "forward"
    module: str = ""
    module_class: str = ""
    forward: int | None = None  # of a backward operation: which it is the derivative of


class Tape:
    """All operations, and what their tensors held."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.ranges = Ranges()
        self.has_modules = False

    def made(self, op: Op) -> str:
        """What is bad in its results: "nan", "inf" or ""."""
        if any(map(self.ranges.has_nan, op.outputs)):
            return "nan"
        return "inf" if any(map(self.ranges.has_inf, op.outputs)) else ""

    def was_given_bad(self, op: Op) -> bool:
        """Something that was not finite came in."""
        return any(self.ranges.is_bad(given.slot) for given in op.inputs)

    def __len__(self) -> int:
        return len(self.ops)
