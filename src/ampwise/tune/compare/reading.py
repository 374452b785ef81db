"""What a profile says: the device's time by kind and by module, and its matrix products."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType

from ampwise.evidence.speed import KINDS, Split
from ampwise.tune.compare.kinds import kind_of_kernel, kind_of_op
from ampwise.tune.compare.scopes import module_of
from ampwise.watch.matrix_work import PRECISIONS

__all__ = ["OUTSIDE", "Kernel", "Op", "Reading", "read", "recorded", "typical"]

OUTSIDE = "(outside the model)"
# Calls of the driver, which have numbers of their own: these would be taken for those of operators.
RUNTIME = re.compile(r"^(cuda|cu|hip)[A-Z]")


class Op(NamedTuple):
    """A call on the host, with the interval it took there in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0
    id: int = 0  # by which kernels name the call that launched them
    number: int = -1  # of the node in the graph that it made, or in a backward pass the one that it runs
    backward: bool = False
    formats: tuple[str, ...] = ()  # of a copy


class Kernel(NamedTuple):
    """Something the device did."""

    name: str
    start: int
    duration: int
    launched_by: int = 0  # the id of a call


@dataclass(slots=True)
class _Node:
    op: Op
    parent: _Node | None
    kind: str = "other"
    inside: int = 0  # nanoseconds of the calls within it
    module: str | None = None

    @property
    def own(self) -> int:
        return max(self.op.end - self.op.start - self.inside, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Seconds of the device; where it launched no kernels, of the operators on the CPU."""

    split: Split
    modules: dict[str, float] = field(default_factory=dict)


def recorded(result: Any) -> tuple[list[Op], list[Kernel]]:
    """The profiler's events as plain data."""
    ops: list[Op] = []
    kernels: list[Kernel] = []
    for event in result.events():
        start, duration = event.start_ns(), event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():  # the host's ranges, drawn on the device once more
                kernels.append(Kernel(event.name(), start, duration, event.linked_correlation_id()))
        elif not event.is_async() and not RUNTIME.match(name := event.name()):
            formats = _formats(event) if name == "aten::copy_" else ()
            thread, number = event.start_thread_id(), event.sequence_nr()
            backward = event.fwd_thread_id() > 0
            ops.append(Op(name, start, start + duration, thread, event.correlation_id(), number, backward, formats))
    return ops, kernels


def _formats(copy: Any) -> tuple[str, ...]:
    """From what to what; of a single number it is no matter."""
    shapes = copy.shapes()
    return tuple(copy.dtypes()[:2]) if shapes and shapes[0] else ()


def read(ops: Iterable[Op], kernels: Sequence[Kernel]) -> Reading:
    """The step's time by kind and by module."""
    nodes = _nested(ops)
    _name_modules(nodes)
    for node in nodes:  # parents first
        node.kind = _kind(node)
    spent = list(_of_kernels(nodes, kernels) if kernels else _of_operators(nodes))
    kinds, modules = dict.fromkeys(KINDS, 0.0), defaultdict[str, float](float)
    for kind, module, nanoseconds in spent:
        kinds[kind] += nanoseconds / 1e9
        if kind != "optimizer":
            modules[OUTSIDE if module is None else module] += nanoseconds / 1e9
    busy = _covered(kernels) if kernels else sum(nanoseconds for _, _, nanoseconds in spent)
    return Reading(
        split=Split(
            seconds={kind: seconds for kind, seconds in kinds.items() if seconds},
            busy=busy / 1e9,
            launches=len(spent),
            on_device=bool(kernels),
        ),
        modules=dict(modules),
    )


def typical(readings: Sequence[Reading]) -> Reading:
    """The median of each of their numbers: of a kind, of a module."""
    splits = [reading.split for reading in readings]
    return Reading(
        split=Split(
            seconds=_medians([split.seconds for split in splits]),
            busy=median(split.busy for split in splits),
            launches=median_high([split.launches for split in splits]),
            on_device=any(split.on_device for split in splits),
        ),
        modules=_medians([reading.modules for reading in readings]),
    )


def _medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for seconds in each for name in seconds)
    found = {name: median(seconds.get(name, 0.0) for seconds in each) for name in names}
    return {name: seconds for name, seconds in found.items() if seconds}


def _nested(ops: Iterable[Op]) -> list[_Node]:
    """Every call below the one it happened in, parents first."""
    nodes: list[_Node] = []
    open_in: dict[int, list[_Node]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        around = open_in[op.thread]
        while around and around[-1].op.end < op.end:
            around.pop()
        parent = around[-1] if around else None
        if parent is not None:
            parent.inside += op.end - op.start
        around.append(_Node(op, parent))
        nodes.append(around[-1])
    return nodes


def _name_modules(nodes: Sequence[_Node]) -> None:
    """Forward by the range around, backward by the number that a node of the graph has in both passes."""
    made_by: dict[int, str] = {}
    for node in nodes:
        node.module = module_of(node.op.name)
        if node.module is None and node.parent is not None:
            node.module = node.parent.module
        if node.module is not None and node.op.number >= 0 and not node.op.backward:
            made_by[node.op.number] = node.module  # the last one: those before it made no node
    for node in nodes:
        if node.op.backward:
            node.module = made_by.get(node.op.number)
        elif node.module is None and node.parent is not None:
            node.module = node.parent.module


def _kind(node: _Node) -> str:
    around = "other" if node.parent is None else node.parent.kind
    if around in ("optimizer", "attention", "casts"):
        return around
    if len(set(node.op.formats)) == 2 and all(each in PRECISIONS for each in node.op.formats):
        return "casts"
    own = kind_of_op(node.op.name)
    if around == "matrix" and own != "optimizer":
        return around  # what a product does inside is part of it
    return around if own == "other" else own


def _of_kernels(nodes: Sequence[_Node], kernels: Sequence[Kernel]) -> Iterator[tuple[str, str | None, int]]:
    by_id = {node.op.id: node for node in nodes if node.op.id}
    for kernel in kernels:
        node = by_id.get(kernel.launched_by)
        kind = "other" if node is None else node.kind
        yield (
            kind_of_kernel(kernel.name) if kind == "other" else kind,
            None if node is None else node.module,
            kernel.duration,
        )


def _of_operators(nodes: Sequence[_Node]) -> Iterator[tuple[str, str | None, int]]:
    for node in nodes:
        # Ranges and nodes of the graph are Python's time and the engine's; compiled code is one such range, too.
        if "::" in node.op.name and not node.op.name.startswith(("ampwise::", "autograd::")):
            yield node.kind, node.module, node.own
        elif "ompiled" in node.op.name:
            yield "other", node.module, node.own


def _covered(kernels: Sequence[Kernel]) -> int:
    """Nanoseconds in which at least one of them ran."""
    total, reached = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(0, end - max(kernel.start, reached))
        reached = max(reached, end)
    return total
