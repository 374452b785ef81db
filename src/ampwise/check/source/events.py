"""Events of a training script in execution order, and the blocks that contain them.

A block is a list of events, branches, loops and calls followed into their functions. ``paths`` turns a block
into the execution paths through it.
"""

from __future__ import annotations

import ast

from ampwise.check.source.line_references import spot

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TypeAlias

    from ampwise.check.source.frame import Frame
    from ampwise.check.source.precision import AutocastContext
    from ampwise.finding import Place

__all__ = [
    "Branch",
    "BranchGuard",
    "EventBlock",
    "EventContext",
    "EventKind",
    "FollowedCall",
    "Jump",
    "Loop",
    "Node",
    "SourceEvent",
]


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


class BranchGuard:
    """Condition of an ``if``, and whether it holds in this branch."""

    __slots__ = ("boundary", "holds", "test", "text")

    def __init__(self, text: str, holds: bool, boundary: str | None = None, test: ast.expr | None = None) -> None:
        self.text = text
        self.holds = holds
        self.boundary = boundary  # for `(i + 1) % n == 0`: the text of n
        self.test = test  # the expression; it is not compared, so equivalent tests are equal

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BranchGuard):
            return NotImplemented
        return self.text == other.text and self.holds == other.holds and self.boundary == other.boundary

    def __hash__(self) -> int:
        return hash((self.text, self.holds, self.boundary))


class Loop:
    """Loop; a path runs its body once."""

    __slots__ = ("block", "frame", "node")

    def __init__(self, node: ast.For | ast.AsyncFor | ast.While, frame: Frame, block: EventBlock) -> None:
        self.node = node
        self.frame = frame
        self.block = block


class EventContext:
    """Where an event happens: in which call, loops, branches and autocast regions."""

    __slots__ = ("autocasts", "frame", "guards", "loops", "no_grad")

    def __init__(
        self,
        frame: Frame,
        autocasts: tuple[AutocastContext, ...] = (),
        loops: tuple[Loop, ...] = (),
        guards: tuple[BranchGuard, ...] = (),
        no_grad: bool = False,
    ) -> None:
        self.frame = frame
        self.autocasts = autocasts
        self.loops = loops
        self.guards = guards
        self.no_grad = no_grad

    @property
    def autocast(self) -> AutocastContext | None:
        """Innermost autocast region, which overrides the outer ones."""
        return self.autocasts[-1] if self.autocasts else None

    @property
    def in_autocast(self) -> bool:
        return self.autocast is not None and self.autocast.may_be_on

    def but(
        self,
        *,
        frame: Frame | None = None,
        autocasts: tuple[AutocastContext, ...] | None = None,
        loops: tuple[Loop, ...] | None = None,
        guards: tuple[BranchGuard, ...] | None = None,
        no_grad: bool | None = None,
    ) -> EventContext:
        """Return a copy with some fields changed."""
        return EventContext(
            self.frame if frame is None else frame,
            self.autocasts if autocasts is None else autocasts,
            self.loops if loops is None else loops,
            self.guards if guards is None else guards,
            self.no_grad if no_grad is None else no_grad,
        )


class SourceEvent:
    """One call that matters to mixed precision, with its context."""

    __slots__ = ("context", "key", "keys", "kind", "node", "other", "value")

    def __init__(
        self,
        kind: str,
        node: ast.expr,
        context: EventContext,
        key: str | None = None,
        other: str | None = None,
        value: ast.expr | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.node = node
        self.context = context
        self.key = key  # the receiver: the scaler of a scaler's step, the model of a forward
        self.other = other  # the optimizer in scaler.step(optimizer)
        self.value = value  # the loss of a backward
        self.keys = keys  # scalers and optimizers that an opaque call gets

    @property
    def frame(self) -> Frame:
        return self.context.frame

    @property
    def place(self) -> Place:
        return self.frame.outline.script.place(self.node)

    @property
    def receiver(self) -> ast.expr:
        """Object in ``scaler.step(...)``; the node itself if it is not a method call."""
        called = self.node.func if isinstance(self.node, ast.Call) else self.node
        return called.value if isinstance(called, ast.Attribute) else called

    def spot(self, seen_from: SourceEvent) -> str:
        """Return how a message about another event refers to this one's line."""
        return spot(self.node, self.frame, seen_from.place)

    @property
    def line(self) -> int:
        return self.node.lineno


class Branch:
    """``if`` with the guards and the block of either side."""

    __slots__ = ("else_guards", "orelse", "then", "then_guards")

    def __init__(
        self,
        then_guards: tuple[BranchGuard, ...],
        else_guards: tuple[BranchGuard, ...],
        then: EventBlock,
        orelse: EventBlock,
    ) -> None:
        self.then_guards = then_guards
        self.else_guards = else_guards
        self.then = then
        self.orelse = orelse


class FollowedCall:
    """Call that was followed; a ``return`` inside ends only this block."""

    __slots__ = ("block", "frame")

    def __init__(self, frame: Frame, block: EventBlock) -> None:
        self.frame = frame
        self.block = block


class Jump:
    """``continue``, ``break``, ``return`` or ``raise``."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


Node: TypeAlias = "SourceEvent | Branch | Loop | FollowedCall | Jump"


class EventBlock:
    """Sequence of events, branches, loops and followed calls."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node] | None = None) -> None:
        self.nodes = [] if nodes is None else nodes
