"""What happens in a training script, in the order it happens: events, and the blocks that hold them.

A block is a list of events, branches, loops and calls followed into their functions. ``paths`` turns a block
into the straight lines that a run may take through it.
"""

from __future__ import annotations

import ast

from ampwise.source.spots import spot

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import TypeAlias

    from ampwise.finding import Place
    from ampwise.source.frame import Frame
    from ampwise.source.precision import Autocast

__all__ = [
    "Block",
    "Branch",
    "Context",
    "Event",
    "Guard",
    "Inlined",
    "Jump",
    "Kind",
    "Loop",
    "Node",
]


class Kind:
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
    GRAD_READ = "grad read"  # a gradient's values are looked at
    FORWARD = "forward"  # a model is called
    OPAQUE = "opaque"  # a function we cannot see gets a scaler or an optimizer


class Guard:
    """One thing an ``if`` asked, and the answer under which we are here."""

    __slots__ = ("boundary", "holds", "test", "text")

    def __init__(self, text: str, holds: bool, boundary: str | None = None, test: ast.expr | None = None) -> None:
        self.text = text
        self.holds = holds
        self.boundary = boundary  # for `(i + 1) % n == 0`: the text of n
        self.test = test  # the question as it stands there: two that ask the same are equal

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Guard):
            return NotImplemented
        return self.text == other.text and self.holds == other.holds and self.boundary == other.boundary

    def __hash__(self) -> int:
        return hash((self.text, self.holds, self.boundary))


class Loop:
    """A loop; its body is gone through once on a path."""

    __slots__ = ("block", "frame", "node")

    def __init__(self, node: ast.For | ast.AsyncFor | ast.While, frame: Frame, block: Block) -> None:
        self.node = node
        self.frame = frame
        self.block = block


class Context:
    """Where an event happens: in which call, loops, branches and autocast regions."""

    __slots__ = ("autocasts", "frame", "guards", "loops", "no_grad")

    def __init__(
        self,
        frame: Frame,
        autocasts: tuple[Autocast, ...] = (),
        loops: tuple[Loop, ...] = (),
        guards: tuple[Guard, ...] = (),
        no_grad: bool = False,
    ) -> None:
        self.frame = frame
        self.autocasts = autocasts
        self.loops = loops
        self.guards = guards
        self.no_grad = no_grad

    @property
    def autocast(self) -> Autocast | None:
        """The innermost autocast region; it alone decides."""
        return self.autocasts[-1] if self.autocasts else None

    @property
    def in_autocast(self) -> bool:
        return self.autocast is not None and self.autocast.may_be_on

    def but(
        self,
        *,
        frame: Frame | None = None,
        autocasts: tuple[Autocast, ...] | None = None,
        loops: tuple[Loop, ...] | None = None,
        guards: tuple[Guard, ...] | None = None,
        no_grad: bool | None = None,
    ) -> Context:
        """The same with something changed."""
        return Context(
            self.frame if frame is None else frame,
            self.autocasts if autocasts is None else autocasts,
            self.loops if loops is None else loops,
            self.guards if guards is None else guards,
            self.no_grad if no_grad is None else no_grad,
        )


class Event:
    """One call that matters, where it happens."""

    __slots__ = ("context", "key", "keys", "kind", "node", "other", "value")

    def __init__(
        self,
        kind: str,
        node: ast.expr,
        context: Context,
        key: str | None = None,
        other: str | None = None,
        value: ast.expr | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.node = node
        self.context = context
        self.key = key  # the object it is done to: the scaler of a scaler's step, a model's forward
        self.other = other  # the optimizer in scaler.step(optimizer)
        self.value = value  # the loss of a backward
        self.keys = keys  # what an opaque call is given

    @property
    def frame(self) -> Frame:
        return self.context.frame

    @property
    def place(self) -> Place:
        return self.frame.outline.script.place(self.node)

    @property
    def receiver(self) -> ast.expr:
        """The object in ``scaler.step(...)``; the node itself where nothing is called on anything."""
        called = self.node.func if isinstance(self.node, ast.Call) else self.node
        return called.value if isinstance(called, ast.Attribute) else called

    def spot(self, seen_from: Event) -> str:
        """How a message about another event calls this one's line."""
        return spot(self.node, self.frame, seen_from.place)

    @property
    def line(self) -> int:
        return self.node.lineno


class Branch:
    """An ``if``: what is known on either side, and what happens there."""

    __slots__ = ("else_guards", "orelse", "then", "then_guards")

    def __init__(
        self, then_guards: tuple[Guard, ...], else_guards: tuple[Guard, ...], then: Block, orelse: Block
    ) -> None:
        self.then_guards = then_guards
        self.else_guards = else_guards
        self.then = then
        self.orelse = orelse


class Inlined:
    """A call that was followed; a ``return`` inside ends only this."""

    __slots__ = ("block", "frame")

    def __init__(self, frame: Frame, block: Block) -> None:
        self.frame = frame
        self.block = block


class Jump:
    """``continue``, ``break``, ``return`` or ``raise``."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


Node: TypeAlias = "Event | Branch | Loop | Inlined | Jump"


class Block:
    """What happens one after the other."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node] | None = None) -> None:
        self.nodes = [] if nodes is None else nodes
