"""A training step on two sides, held against each other: what was measured, for the rules in ``rules/difference``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.evidence.compared import BEYOND, Compared, finite
from ampwise.evidence.conduct import Site
from ampwise.evidence.op_families import base_name, family_of
from ampwise.finding import Place

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FUNCTION",
    "Differing",
    "Growth",
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
    op: OpRow | None = None  # where one looked closer, the first operation beyond

    @property
    def cause(self) -> str:
        """What it is, by its numbers and by the operation; a rule for each."""
        measured = self.compared.measured
        if self.compared.flipped or measured is None:
            return "choice"
        if measured.bad_a != measured.bad_b:
            return "overflow"
        if self.flushed:
            return "underflow"
        return "cancellation" if self._cancels else "steep"

    @property
    def _cancels(self) -> bool:
        family = "" if self.op is None else family_of(self.op.op)
        if family in SUMS or (self.op is not None and base_name(self.op.op) in DIFFERENCES):
            return True
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
class Growth:
    """How the error goes along the depth, of modules that have one."""

    first: float
    last: float
    largest: float
    largest_at: str
    modules: int
    factor: float | None  # from one module to the next, by the best straight line through the logarithms

    @classmethod
    def of(cls, errors: Iterable[tuple[str, float | None]]) -> Growth | None:
        """
        >>> Growth.of([("a", 0.0), ("b", 0.001), ("c", 0.002), ("d", 0.004)]).factor
        2.0
        """
        known = [(name, error) for name, error in errors if error is not None and 0 < error < math.inf]
        if not known:
            return None
        largest = max(known, key=lambda pair: pair[1])
        factor = _factor([error for _, error in known])
        return cls(
            first=known[0][1],
            last=known[-1][1],
            largest=largest[1],
            largest_at=largest[0],
            modules=len(known),
            factor=factor,
        )


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
    def loss_error(self) -> float | None:
        """Of the loss, relative."""
        a, b = self.a.loss, self.b.loss
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        return abs(b - a) / abs(a) if a else (math.inf if b else 0.0)

    def growth(self, phase: str = FORWARD) -> Growth | None:
        """Along the innermost modules; of gradients, from the loss back."""
        leaves = [row for row in self.rows if row.is_leaf]
        if phase == FORWARD:
            return Growth.of((row.label, row.error) for row in leaves)
        return Growth.of((row.label, row.gradient_error) for row in reversed(leaves))

    def caused_by(self, cause: str) -> Iterator[Spot]:
        """The places of one kind, the first of all of them first."""
        return (spot for spot in self.spots if spot.cause == cause)


def _worst(compared: tuple[Compared, ...]) -> float | None:
    return max((each.error for each in compared), default=None)


def _factor(errors: list[float]) -> float | None:
    """
    >>> _factor([1.0, 8.0, 64.0]), _factor([3.0])
    (8.0, None)
    """
    count = len(errors)
    if count < 2:
        return None
    middle = (count - 1) / 2
    slope = sum((place - middle) * math.log2(error) for place, error in enumerate(errors))
    return float(2 ** (slope / sum((place - middle) ** 2 for place in range(count))))
