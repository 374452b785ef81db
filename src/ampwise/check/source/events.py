"""Events of a training script in execution order, and the blocks that contain them.

A block is a list of events, branches, loops and calls followed into their functions. ``execution_paths`` turns a block
into the paths through it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ampwise.check.source.line_references import spot

if TYPE_CHECKING:
    from ampwise.check.source.frame import Frame
    from ampwise.check.source.precision import AutocastContext
    from ampwise.finding import Place


class EventKind:
    """The kinds of events, by name; plain strings, because rules compare them by the thousand."""

    BACKWARD = "backward"  # loss.backward()
    SCALED_BACKWARD = "scaled backward"  # scaler.scale(loss).backward()
    UNSCALE = "unscale"  # scaler.unscale_(optimizer)
    SCALER_STEP = "scaler step"  # scaler.step(optimizer)
    UPDATE = "update"  # scaler.update()
    OPTIMIZER_STEP = "optimizer step"  # optimizer.step()
    SCHEDULER_STEP = "scheduler step"  # scheduler.step()
    ZERO_GRAD = "zero grad"
    CLIP = "clip"
    GRAD_READ = "grad read"  # a gradient's values are read
    FORWARD = "forward"  # a model is called
    OPAQUE = "opaque"  # a function we cannot follow gets a scaler or an optimizer


@dataclass(slots=True, unsafe_hash=True)  # `frozen` would make it slow: there is one for each test in each context
class BranchGuard:
    """Condition of an ``if``, and whether it holds in this branch."""

    text: str
    holds: bool
    boundary: str | None = None  # for `(i + 1) % n == 0`: the text of n
    test: ast.expr | None = field(default=None, compare=False)  # not compared: equivalent tests are equal
    frame: Frame | None = field(default=None, compare=False)  # of the test
    literal_of: str | None = field(default=None, compare=False)  # for `mode == "amp"`: the text without the literal


@dataclass(slots=True, eq=False)
class Loop:
    """Loop; a path runs its body once."""

    node: ast.For | ast.AsyncFor | ast.While
    frame: Frame
    block: EventBlock


@dataclass(slots=True, eq=False)
class EventContext:
    """Where an event happens: in which call, loops, branches and autocast regions."""

    frame: Frame
    autocasts: tuple[AutocastContext, ...] = ()
    loops: tuple[Loop, ...] = ()
    guards: tuple[BranchGuard, ...] = ()
    no_grad: bool = False

    @property
    def autocast(self) -> AutocastContext | None:
        """Innermost autocast region, which overrides the outer ones."""
        return self.autocasts[-1] if self.autocasts else None

    @property
    def in_autocast(self) -> bool:
        return bool(self.autocasts) and self.autocasts[-1].may_be_on


@dataclass(slots=True, eq=False)
class SourceEvent:
    """One call that matters to mixed precision, with its context."""

    kind: str
    node: ast.expr
    context: EventContext
    key: str | None = None  # the receiver: the scaler of a scaler's step, the model of a forward
    other: str | None = None  # the optimizer in scaler.step(optimizer)
    value: ast.expr | None = None  # the loss of a backward; the optimizer of a step within another call
    keys: tuple[str, ...] = ()  # scalers and optimizers that an opaque call gets

    @property
    def frame(self) -> Frame:
        return self.context.frame

    @property
    def place(self) -> Place:
        return self.context.frame.outline.script.place(self.node)

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def receiver(self) -> ast.expr:
        """Object in ``scaler.step(...)``; the node itself if it is not a method call."""
        called = self.node.func if isinstance(self.node, ast.Call) else self.node
        return called.value if isinstance(called, ast.Attribute) else called

    def spot(self, seen_from: SourceEvent) -> str:
        """Return how a message about another event refers to this one's line."""
        return spot(self.node, self.context.frame, seen_from.place)


@dataclass(slots=True, eq=False)
class Branch:
    """``if`` with the guards and the block of either side."""

    then_guards: tuple[BranchGuard, ...]
    else_guards: tuple[BranchGuard, ...]
    then: EventBlock
    orelse: EventBlock


@dataclass(slots=True, eq=False)
class FollowedCall:
    """Call that was followed; a ``return`` inside ends only this block."""

    frame: Frame
    block: EventBlock


@dataclass(slots=True, eq=False)
class Jump:
    """``continue``, ``break``, ``return`` or ``raise``."""

    kind: str


Node: TypeAlias = SourceEvent | Branch | Loop | FollowedCall | Jump


@dataclass(slots=True, eq=False)
class EventBlock:
    """Sequence of events, branches, loops and followed calls."""

    nodes: list[Node] = field(default_factory=list)
