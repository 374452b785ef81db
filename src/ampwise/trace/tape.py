"""The tape: the operations of a step in order, and which tensors each read and wrote.

The tape does not keep tensors, only their smallest and largest values (a slot of ``Ranges``) and their ``Storage``: an
operation may overwrite its input, or write into a part of another tensor's storage that a view reads later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampwise.finding.call_site import CallSite
from ampwise.trace.value_ranges import ValueRanges

__all__ = ["RecordedOp", "RecordedStorage", "Tape", "TensorRead", "TensorWrite"]


class TensorWrite(NamedTuple):
    """A write of an operation to a storage."""

    op: int
    slot: int


@dataclass(slots=True, eq=False)
class RecordedStorage:
    """A tensor storage, from its first use on."""

    leaf: Tensor | None = None  # a tensor that existed before: a weight, the batch, a constant
    address: StorageWeakRef | None = None  # keeps the address from being reused by a tensor that is made later
    writers: list[TensorWrite] = field(default_factory=list)
    measured: dict[object, tuple[int, int]] = field(default_factory=dict)  # by view: number of writers then, slot


class TensorRead(NamedTuple):
    """A read of a storage by an operation."""

    storage: RecordedStorage
    writers: int  # how many operations had written to it by then
    slot: int


@dataclass(slots=True, eq=False)
class RecordedOp:
    """A recorded operation."""

    index: int
    name: str  # "aten.addmm.default"
    dtype: str  # of its first result
    inputs: tuple[TensorRead, ...]
    outputs: tuple[int, ...]  # slots
    scalars: tuple[float, ...] = ()  # Python floats among its arguments
    site: CallSite = field(default_factory=CallSite)
    live: bool = True  # the line itself was running; False: the line is that of the forward operation
    phase: str = "forward"
    module: str = ""
    module_class: str = ""
    forward: int | None = None  # for a backward operation, the index of its forward operation


class Tape:
    """All recorded operations, and the value ranges of their tensors."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self.ranges = ValueRanges()
        self.has_modules = False

    def made(self, op: RecordedOp) -> str:
        """Return what is bad in an operation's results: "nan", "inf" or ""."""
        if any(map(self.ranges.has_nan, op.outputs)):
            return "nan"
        return "inf" if any(map(self.ranges.has_inf, op.outputs)) else ""

    def was_given_bad(self, op: RecordedOp) -> bool:
        """Return whether one of the inputs was not finite."""
        return any(self.ranges.is_bad(given.slot) for given in op.inputs)

    def __len__(self) -> int:
        return len(self.ops)
