"""What happens in a training script, in the order it happens: events, and the blocks that hold them.

A block is a list of events, branches, loops and calls followed into their functions. ``paths`` turns a block
into the straight lines that a run may take through it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True, frozen=True)
class Guard:
    """One thing an ``if`` asked, and the answer under which we are here."""

    text: str
    holds: bool
    boundary: str | None = None  # for `(i + 1) % n == 0`: the text of n
    test: ast.expr | None = field(default=None, compare=False, hash=False)


@dataclass(slots=True, eq=False)
class Loop:
    """A loop; its body is gone through once on a path."""

    node: ast.For | ast.AsyncFor | ast.While
    frame: Frame
    block: Block


@dataclass(slots=True, eq=False)
class Context:
    """Where an event happens: in which call, loops, branches and autocast regions."""

    frame: Frame
    autocasts: tuple[Autocast, ...] = ()
    loops: tuple[Loop, ...] = ()
    guards: tuple[Guard, ...] = ()
    no_grad: bool = False

    @property
    def autocast(self) -> Autocast | None:
        """The innermost autocast region; it alone decides."""
        return self.autocasts[-1] if self.autocasts else None

    @property
    def in_autocast(self) -> bool:
        return self.autocast is not None and self.autocast.may_be_on

    def but(self, **changes: object) -> Context:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class Event:
    """One call that matters, where it happens."""

    kind: str
    node: ast.expr
    context: Context
    key: str | None = None  # the object it is done to: the scaler of a scaler's step, a model's forward
    other: str | None = None  # the optimizer in scaler.step(optimizer)
    value: ast.expr | None = None  # the loss of a backward
    keys: tuple[str, ...] = ()  # what an opaque call is given

    @property
    def frame(self) -> Frame:
        return self.context.frame

    @property
    def place(self) -> Place:
        return self.frame.outline.script.place(self.node)

    @property
    def line(self) -> int:
        return self.node.lineno


@dataclass(slots=True, eq=False)
class Branch:
    """An ``if``: what is known on either side, and what happens there."""

    then_guards: tuple[Guard, ...]
    else_guards: tuple[Guard, ...]
    then: Block
    orelse: Block


@dataclass(slots=True, eq=False)
class Inlined:
    """A call that was followed; a ``return`` inside ends only this."""

    frame: Frame
    block: Block


@dataclass(slots=True, eq=False)
class Jump:
    """``continue``, ``break``, ``return`` or ``raise``."""

    kind: str


Node: TypeAlias = "Event | Branch | Loop | Inlined | Jump"


@dataclass(slots=True, eq=False)
class Block:
    """What happens one after the other."""

    nodes: list[Node] = field(default_factory=list)
