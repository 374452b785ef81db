"""A training step computed on two sides and compared: the measurements that the rules AMP53x examine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ampwise.finding import Place
from ampwise.finding.call_site import CallSite
from ampwise.numbers.op_families import base_name, family_of
from ampwise.tune.diff.tensor_difference import BEYOND, FLOOR_TIMES, ComparedTensor, finite_or_none
from ampwise.tune.diff.token_difference import TokenDifference, TriedPolicy

FORWARD, BACKWARD = "forward", "backward"
FUNCTION = "the function"  # the compared function, as a location
SUMS = ("matrix", "sum", "mean")  # families of operations whose terms may cancel
DIFFERENCES = ("sub", "rsub", "add")
# Operations that pass on their input, possibly scaled: they do not amplify errors.
PLAIN = frozenset(
    {"mul", "neg", "clone", "copy", "relu", "abs", "index", "index_select", "gather", "embedding", "cat", "stack"}
    | {"flip", "roll"}
)
LARGE = 0.3  # an error that matters even if rounding explains every location


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A call of a module, in call order."""

    name: str  # in the model; "" for the model itself
    kind: str  # its class
    call: int = 0  # index of this call of the module
    calls: int = 1  # total calls of the module
    depth: int = 0  # number of enclosing modules
    is_leaf: bool = True  # no module was called in it
    outputs: tuple[ComparedTensor, ...] = ()
    inputs: tuple[ComparedTensor, ...] = ()  # inputs computed by code between modules
    gradients: tuple[ComparedTensor, ...] = ()  # of the loss with respect to its outputs
    only: str = ""  # "a" or "b", if the other side did not call it

    @property
    def label(self) -> str:
        """Name shown to the user."""
        return f"{self.name or self.kind}{f' (call {self.call + 1})' if self.calls > 1 else ''}"

    @property
    def error(self) -> float | None:
        """Largest error of its outputs."""
        return _worst(self.outputs)

    @property
    def gradient_error(self) -> float | None:
        """Largest error of the gradients of its outputs."""
        return _worst(self.gradients)

    @property
    def times(self) -> float:
        """Largest ratio to the expected error, forward or backward."""
        return max((each.times for each in (*self.outputs, *self.gradients) if each.times is not None), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shown = {"module": self.name, "class": self.kind, "call": self.call, "calls": self.calls, "depth": self.depth}
        lists = {"outputs": self.outputs, "inputs": self.inputs, "gradients": self.gradients}
        parts = {name: [each.as_dict() for each in found] for name, found in lists.items()}
        return shown | {"only_in": self.only or None} | parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An operation compared on both sides."""

    op: str  # "aten.sub.Tensor"
    module: str
    call: int
    phase: str
    compared: ComparedTensor
    site: CallSite = field(default_factory=CallSite)
    shrinks: float | None = None  # ratio of input to output magnitude

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        where = {"op": self.op, "module": self.module, "call": self.call, "phase": self.phase}
        return where | {"file": self.site.file, "line": self.site.line} | self.compared.as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """A parameter's gradient as the optimizer gets it: unscaled, not clipped."""

    name: str
    compared: ComparedTensor
    share: float | None = None  # typical magnitude relative to that of all gradients

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"parameter": self.name, "share_of_rms": self.share} | self.compared.as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLocation:
    """A location whose error exceeds what rounding explains."""

    module: str  # name shown to the user
    kind: str
    phase: str
    compared: ComparedTensor
    before: str = ""  # the module's own code before it calls this submodule
    after: str = ""  # for a gradient: the module that consumes this one's output, if any
    between: bool = False  # the module's own code, between its submodules
    shrinks: float | None = None  # ratio of input to output magnitude
    flushed: bool = False  # values that one side rounded to zero are below its range
    subnormal: bool = False  # typical values are subnormal in that side's format
    op: OpRow | None = None  # the first operation beyond rounding, if operations were compared
    in_parts: bool = False  # one side computed the batch in parts

    @property
    def cause(self) -> str:
        """The cause, derived from the numbers and the operation; there is a rule for each."""
        measured, op = self.compared.measured, self.op
        family, name = ("", "") if op is None else (family_of(op.op), base_name(op.op))
        is_sum, is_plain = family in SUMS or name in DIFFERENCES, name in PLAIN
        if self.compared.flipped or measured is None:
            return "choice"
        if measured.apart:
            return "overflow"
        if self.in_parts:
            return "otherwise"
        if self.flushed or (self.subnormal and not is_sum):
            return "underflow"
        if is_sum:
            return "cancellation"
        if is_plain:
            return "otherwise" if op is not None and op.compared.beyond else "steep"
        # Is the result so much smaller than its inputs that this alone explains the error?
        shrinks = max(self.shrinks or 0.0, (op.shrinks or 0.0) if op is not None else 0.0)
        cancels = not family and shrinks >= max(BEYOND, (self.compared.times or 0.0) / BEYOND)
        return "cancellation" if cancels else "steep"

    @property
    def where(self) -> str:
        """Description of the location."""
        if self.phase == BACKWARD:
            consumer = f"`{self.after}`" if self.after else "the code after it"
            return f"the gradient of what `{self.module}` returns, from the derivative of {consumer}"
        if self.module == FUNCTION:
            return f"the function's own code{f' before `{self.before}`' if self.before else ''}"
        if self.before:
            return f"the code of `{self.module}` before `{self.before}`"
        return f"the code of `{self.module}` between its submodules" if self.between else f"`{self.module}`"

    @property
    def policy_name(self) -> str:
        """Name of the module to keep, for a policy; "" for the model itself, or code outside it."""
        name = self.after if self.phase == BACKWARD else self.module
        plain = name.partition(" (call")[0]
        return "" if plain in (FUNCTION, self.kind) else plain

    @property
    def place(self) -> Place:
        """Location for a finding: the module, and the line if known."""
        site = CallSite() if self.op is None else self.op.site
        return Place(file=site.file, line=site.line, module=self.module)

    def evidence(self) -> dict[str, Any]:
        """Return what is known, for a finding."""
        compared, measured = self.compared, self.compared.measured
        known = {
            "phase": self.phase,
            "relative_error": finite_or_none(compared.error),
            "times_expected": None if compared.times is None else finite_or_none(compared.times),
            "given": finite_or_none(compared.given),
            "op": None if self.op is None else self.op.op,
            "largest_error_at": None if measured is None else list(measured.largest_at),
        }
        return {name: value for name, value in known.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "where": self.where.replace("`", ""),
            "module": self.module,
            "class": self.kind,
            "phase": self.phase,
            "cause": self.cause,
            "before": self.before or None,
            "op": None if self.op is None else self.op.as_dict(),
            "shrinks": self.shrinks,
            **self.compared.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """Settings and results of one side."""

    label: str  # as requested: "bf16,attention=math"
    precision: str
    device: str
    roundoff: float  # of the values that its matmuls read
    gradient_roundoff: float
    loss: float | None
    scale: float | None = None  # loss scale in the backward pass
    compiled: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"loss": finite_or_none(self.loss)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of the error along the depth, over the modules that have one."""

    first: float
    last: float
    largest: float
    largest_at: str
    modules: int
    factor: float | None  # per module, from a linear fit to the logarithms

    @classmethod
    def of(cls, errors: Iterable[tuple[str, float | None]]) -> Growth | None:
        """
        >>> Growth.of([("a", 0.0), ("b", 0.001), ("c", 0.002), ("d", 0.004)]).factor
        2.0
        """
        known = [(name, error) for name, error in errors if error is not None and 0 < error < math.inf]
        if not known:
            return None
        largest_at, largest = max(known, key=lambda pair: pair[1])
        factor, middle = None, (len(known) - 1) / 2
        if len(known) > 1:
            slope = sum((place - middle) * math.log2(error) for place, (_, error) in enumerate(known))
            factor = 2 ** (slope / sum((place - middle) ** 2 for place in range(len(known))))
        return cls(
            first=known[0][1],
            last=known[-1][1],
            largest=largest,
            largest_at=largest_at,
            modules=len(known),
            factor=factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """A step compared on two sides."""

    name: str
    a: SideFacts
    b: SideFacts
    rows: tuple[ModuleRow, ...] = ()
    returned: tuple[ComparedTensor, ...] = ()  # outputs of the function itself
    ops: tuple[OpRow, ...] = ()
    parameters: tuple[ParameterRow, ...] = ()
    spots: tuple[ErrorLocation, ...] = ()  # forward in call order, then backward in gradient order
    floor: float | None = None  # the largest error between two runs of a; None: not measured
    floor_at: str = ""
    tokens: TokenDifference | None = None  # log-probabilities of the targets; None: none were seen on both sides
    token_noise: float | None = None  # their RMS difference between two runs of a; None: not measured
    remedies: tuple[TriedPolicy, ...] = ()  # cheapest first
    draws_from: tuple[str, ...] = ()  # iterators that the function takes items from
    notes: tuple[str, ...] = ()  # what could not be compared, and why

    @property
    def first(self) -> ErrorLocation | None:
        """First location that rounding does not explain."""
        return self.spots[0] if self.spots else None

    @property
    def unsteady(self) -> bool:
        """Whether two runs of a differ by more than rounding explains, or run different modules."""
        if self.floor == math.inf and any(row.only for row in self.rows):
            return True
        found = (each for row in self.rows for each in (*row.inputs, *row.outputs))
        return any(each.unsteady for each in (*found, *self.returned))

    @property
    def noise_matters(self) -> bool:
        """Whether two runs of a differ as much as the sides do anywhere, or by more than rounding explains."""
        found = [each for row in self.rows for each in row.outputs]
        found += [*self.returned, *(row.compared for row in self.parameters)]
        return self.unsteady or any(each.floor and each.error <= FLOOR_TIMES * each.floor for each in found)

    @property
    def piled_up(self) -> tuple[str, Growth] | None:
        """Phase in which errors accumulate to a large one although rounding explains every location."""
        if self.spots or self.unsteady:
            return None
        grown = {phase: self.growth(phase) for phase in (FORWARD, BACKWARD)}
        least = max(LARGE, FLOOR_TIMES * (self.floor or 0.0))
        return next(((phase, growth) for phase, growth in grown.items() if growth and growth.largest >= least), None)

    @property
    def worst_row(self) -> ModuleRow | None:
        """Module with the largest output error, nested or not."""
        off = [row for row in self.rows if row.error]
        return max(off, key=lambda row: (row.error or 0.0, row.is_leaf), default=None)

    @property
    def starts_in(self) -> ModuleRow | None:
        """First module whose output differs at all, beyond the noise of a."""
        leaves = (row for row in self.rows if row.is_leaf and row.error)
        return next((row for row in leaves if any(each.error > (each.floor or 0.0) for each in row.outputs)), None)

    @property
    def loss_error(self) -> float | None:
        """Relative error of the loss."""
        a, b = self.a.loss, self.b.loss
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        return abs(b - a) / abs(a) if a else (math.inf if b else 0.0)

    def growth(self, phase: str = FORWARD) -> Growth | None:
        """Return the growth along the innermost modules, or all if those have no error; backward from the loss."""
        rows = self.rows if phase == FORWARD else self.rows[::-1]
        found = [(row, row.error if phase == FORWARD else row.gradient_error) for row in rows]
        return Growth.of((row.label, error) for row, error in found if row.is_leaf) or Growth.of(
            (row.label, error) for row, error in found
        )

    def caused_by(self, cause: str) -> Iterator[ErrorLocation]:
        """Return the locations with one cause, in order."""
        return (spot for spot in self.spots if spot.cause == cause)


def _worst(compared: tuple[ComparedTensor, ...]) -> float | None:
    return max((each.error for each in compared), default=None)
