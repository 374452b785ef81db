"""A training step on two sides, held against each other: what was measured, for the rules in ``rules/difference``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.evidence.compared import BEYOND, FLOOR_TIMES, Compared, finite
from ampwise.evidence.conduct import Site
from ampwise.evidence.difference_growth import Growth
from ampwise.evidence.op_families import base_name, family_of
from ampwise.finding import Place

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FUNCTION",
    "Differing",
    "ModuleRow",
    "OpRow",
    "ParameterRow",
    "SideFacts",
    "Spot",
]

FORWARD, BACKWARD = "forward", "backward"
FUNCTION = "the function"  # that was given, as a place
SUMS = ("matrix", "sum", "mean")  # families of operations whose terms may cancel
DIFFERENCES = ("sub", "rsub", "add")
# Operations that hand on what they are given as it is, or times something: they make no large error of a small one.
PLAIN = (
    "mul",
    "neg",
    "clone",
    "copy",
    "relu",
    "abs",
    "index",
    "index_select",
    "gather",
    "embedding",
    "cat",
    "stack",
    "flip",
    "roll",
)
LARGE = 0.3  # an error that matters even where each place is explained


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A call of a module, in the order of calls."""

    name: str  # in the model; "" of the model itself
    kind: str  # its class
    call: int = 0  # which call of this module
    calls: int = 1  # of how many
    depth: int = 0  # modules around it
    is_leaf: bool = True  # no module was called in it
    outputs: tuple[Compared, ...] = ()
    inputs: tuple[Compared, ...] = ()  # those that code between modules has made for it
    gradients: tuple[Compared, ...] = ()  # of the loss by its outputs
    only: str = ""  # "a" or "b", where the other has not called it

    @property
    def label(self) -> str:
        """As one says it."""
        return f"{self.name or self.kind}{f' (call {self.call + 1})' if self.calls > 1 else ''}"

    @property
    def error(self) -> float | None:
        """Of what it returned."""
        return _worst(self.outputs)

    @property
    def gradient_error(self) -> float | None:
        """Of the gradients by what it returned."""
        return _worst(self.gradients)

    @property
    def times(self) -> float:
        """How many times what is explained, at most: forward or backward."""
        return max((each.times for each in (*self.outputs, *self.gradients) if each.times is not None), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shown = {"module": self.name, "class": self.kind, "call": self.call, "calls": self.calls, "depth": self.depth}
        lists = {"outputs": self.outputs, "inputs": self.inputs, "gradients": self.gradients}
        parts = {name: [each.as_dict() for each in found] for name, found in lists.items()}
        return shown | {"only_in": self.only or None} | parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An operation, seen on both sides."""

    op: str  # "aten.sub.Tensor"
    module: str
    call: int
    phase: str
    compared: Compared
    site: Site = field(default_factory=Site)
    shrinks: float | None = None  # how many times larger what it was given is than what it made

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        line = {"file": self.site.file, "line": self.site.line}
        return (
            {"op": self.op, "module": self.module, "call": self.call, "phase": self.phase}
            | line
            | self.compared.as_dict()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """The gradient of a parameter as the optimizer gets it: unscaled, not clipped."""

    name: str
    compared: Compared
    share: float | None = None  # its typical magnitude, in those of all gradients together

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"parameter": self.name, "share_of_rms": self.share} | self.compared.as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A place whose error rounding does not explain."""

    module: str  # as one says it
    kind: str
    phase: str
    compared: Compared
    before: str = ""  # it is the module's own code, before this module in it is called
    after: str = ""  # of a gradient: the module that was given what this one returns, if one was
    between: bool = False  # it is the module's own code, around the modules in it
    shrinks: float | None = None  # how many times larger what it was given is than what it made
    flushed: bool = False  # what one side has turned to zero lies below its range
    subnormal: bool = False  # typical values lie where that side's format has fewer bits
    op: OpRow | None = None  # where one looked closer, the first operation beyond

    @property
    def cause(self) -> str:
        """What it is, by its numbers and by the operation; a rule for each."""
        measured = self.compared.measured
        if self.compared.flipped or measured is None:
            return "choice"
        if measured.apart:
            return "overflow"
        if self.flushed or (self.subnormal and not self._sums):
            return "underflow"
        if self._cancels:
            return "cancellation"
        return "otherwise" if self._is_plain and self.op is not None and self.op.compared.beyond else "steep"

    @property
    def _sums(self) -> bool:
        """By the operation."""
        return self.op is not None and (family_of(self.op.op) in SUMS or base_name(self.op.op) in DIFFERENCES)

    @property
    def _is_plain(self) -> bool:
        return self.op is not None and base_name(self.op.op) in PLAIN

    @property
    def _cancels(self) -> bool:
        family = "" if self.op is None else family_of(self.op.op)
        if self._sums or self._is_plain:
            return self._sums
        shrinks = max(self.shrinks or 0.0, (self.op.shrinks or 0.0) if self.op is not None else 0.0)
        # What is left is so much smaller than what it was made of that this alone explains the error.
        return not family and shrinks >= max(BEYOND, (self.compared.times or 0.0) / BEYOND)

    @property
    def where(self) -> str:
        """In words."""
        if self.phase == BACKWARD:
            maker = f"`{self.after}`" if self.after else "the code after it"
            return f"the gradient by what `{self.module}` returns, from the derivative of {maker}"
        if self.module == FUNCTION:
            return f"the function's own code{f' before `{self.before}`' if self.before else ''}"
        if self.before:
            return f"the code of `{self.module}` before `{self.before}`"
        return f"the code of `{self.module}` around its modules" if self.between else f"`{self.module}`"

    @property
    def place(self) -> Place:
        """For a finding: the module, and the line where it is known."""
        site = Site() if self.op is None else self.op.site
        return Place(file=site.file, line=site.line, module=self.module)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        said = {"where": self.where.replace("`", ""), "module": self.module, "class": self.kind, "phase": self.phase}
        said["cause"] = self.cause
        closer = {"op": None if self.op is None else self.op.as_dict(), "shrinks": self.shrinks}
        return said | {"before": self.before or None} | closer | self.compared.as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """How a side computed."""

    label: str  # as it is asked for: "bf16,attention=math"
    precision: str
    device: str
    roundoff: float  # of the values that its products read
    gradient_roundoff: float
    loss: float | None
    scale: float | None = None  # of the loss, in the backward pass
    compiled: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"loss": finite(self.loss)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A step on two sides."""

    subject: str
    a: SideFacts
    b: SideFacts
    rows: tuple[ModuleRow, ...] = ()
    returned: tuple[Compared, ...] = ()  # by the function itself
    ops: tuple[OpRow, ...] = ()
    parameters: tuple[ParameterRow, ...] = ()
    spots: tuple[Spot, ...] = ()  # forward in the order of calls, then backward in that of gradients
    floor: float | None = None  # the largest error between two runs of a; None: not measured
    floor_at: str = ""
    draws_from: tuple[str, ...] = ()  # iterators that the function takes items of
    notes: tuple[str, ...] = ()  # what could not be compared, and why

    @property
    def first(self) -> Spot | None:
        """The first place beyond what rounding explains."""
        return self.spots[0] if self.spots else None

    @property
    def unsteady(self) -> bool:
        """Whether two runs of a differ by more than rounding explains, or in what they run."""
        if self.floor == math.inf and any(row.only for row in self.rows):
            return True
        found = (each for row in self.rows for each in (*row.inputs, *row.outputs))
        return any(each.unsteady for each in (*found, *self.returned))

    @property
    def piled_up(self) -> tuple[str, Growth] | None:
        """The phase in which errors add up to a large one, though rounding explains each place."""
        if self.spots or self.unsteady:
            return None
        grown = {phase: self.growth(phase) for phase in (FORWARD, BACKWARD)}
        least = max(LARGE, FLOOR_TIMES * (self.floor or 0.0))
        return next(((phase, growth) for phase, growth in grown.items() if growth and growth.largest >= least), None)

    @property
    def worst_row(self) -> ModuleRow | None:
        """The module that is furthest off in what it returned, be there others in it or not."""
        off = [row for row in self.rows if row.error]
        return max(off, key=lambda row: (row.error or 0.0, row.is_leaf), default=None)

    @property
    def loss_error(self) -> float | None:
        """Of the loss, relative."""
        a, b = self.a.loss, self.b.loss
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        return abs(b - a) / abs(a) if a else (math.inf if b else 0.0)

    def growth(self, phase: str = FORWARD) -> Growth | None:
        """Along the innermost modules, or all of them where those have no error; of gradients, from the loss back."""
        rows = self.rows if phase == FORWARD else self.rows[::-1]
        found = [(row, row.error if phase == FORWARD else row.gradient_error) for row in rows]
        return Growth.of((row.label, error) for row, error in found if row.is_leaf) or Growth.of(
            (row.label, error) for row, error in found
        )

    def caused_by(self, cause: str) -> Iterator[Spot]:
        """The places of one kind, the first of all of them first."""
        return (spot for spot in self.spots if spot.cause == cause)


def _worst(compared: tuple[Compared, ...]) -> float | None:
    return max((each.error for each in compared), default=None)
