"""Summarize a profile: the device's time by kind of work and by module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType

from ampwise.tune.compare.profiler_ranges import module_of
from ampwise.tune.compare.speeds import KINDS, TimeSplit
from ampwise.tune.compare.work_kinds import kind_of_kernel, kind_of_op
from ampwise.watch.matmul_work import PRECISIONS

__all__ = ["OUTSIDE", "ProfileSummary", "ProfiledKernel", "ProfiledOp", "median_summary", "profile_events", "summarize"]

OUTSIDE = "(outside the model)"
# Driver calls have their own numbering, which would be confused with that of operators.
RUNTIME = re.compile(r"^(cuda|cu|hip)[A-Z]")


class ProfiledOp(NamedTuple):
    """A call on the host, with its interval in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0
    id: int = 0  # kernels refer to the call that launched them by it
    number: int = -1  # sequence number of the graph node that it made, or that it runs in the backward pass
    backward: bool = False
    formats: tuple[str, ...] = ()  # source and target dtype of a copy


class ProfiledKernel(NamedTuple):
    """A kernel or copy that ran on the device."""

    name: str
    start: int
    duration: int
    launched_by: int = 0  # the id of a call


@dataclass(slots=True)
class _OpNode:
    op: ProfiledOp
    parent: _OpNode | None
    kind: str = "other"
    inside: int = 0  # nanoseconds of nested calls
    module: str | None = None

    @property
    def own(self) -> int:
        return max(self.op.end - self.op.start - self.inside, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """Seconds of device time; of operators on the CPU where no kernels were launched."""

    split: TimeSplit
    modules: dict[str, float] = field(default_factory=dict)


def profile_events(result: Any) -> tuple[list[ProfiledOp], list[ProfiledKernel]]:
    """Convert the profiler's events to plain data."""
    ops: list[ProfiledOp] = []
    kernels: list[ProfiledKernel] = []
    for event in result.events():
        start, duration = event.start_ns(), event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            if not event.is_user_annotation():  # the host's ranges, shown on the device again
                kernels.append(ProfiledKernel(event.name(), start, duration, event.linked_correlation_id()))
        elif not event.is_async() and not RUNTIME.match(name := event.name()):
            formats = _formats(event) if name == "aten::copy_" else ()
            thread, number = event.start_thread_id(), event.sequence_nr()
            backward = event.fwd_thread_id() > 0
            ops.append(
                ProfiledOp(name, start, start + duration, thread, event.correlation_id(), number, backward, formats)
            )
    return ops, kernels


def _formats(copy: Any) -> tuple[str, ...]:
    """Return source and target dtype; nothing for a single number, where a cast costs nothing."""
    shapes = copy.shapes()
    return tuple(copy.dtypes()[:2]) if shapes and shapes[0] else ()


def summarize(ops: Iterable[ProfiledOp], kernels: Sequence[ProfiledKernel]) -> ProfileSummary:
    """Sum up a step's time by kind and by module."""
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
    return ProfileSummary(
        split=TimeSplit(
            seconds={kind: seconds for kind, seconds in kinds.items() if seconds},
            busy=busy / 1e9,
            launches=len(spent),
            on_device=bool(kernels),
        ),
        modules=dict(modules),
    )


def median_summary(readings: Sequence[ProfileSummary]) -> ProfileSummary:
    """Return the median of each number, per kind and per module."""
    splits = [reading.split for reading in readings]
    return ProfileSummary(
        split=TimeSplit(
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


def _nested(ops: Iterable[ProfiledOp]) -> list[_OpNode]:
    """Return the calls as a tree, parents first."""
    nodes: list[_OpNode] = []
    open_in: dict[int, list[_OpNode]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        stack = open_in[op.thread]
        while stack and stack[-1].op.end < op.end:
            stack.pop()
        parent = stack[-1] if stack else None
        if parent is not None:
            parent.inside += op.end - op.start
        stack.append(_OpNode(op, parent))
        nodes.append(stack[-1])
    return nodes


def _name_modules(nodes: Sequence[_OpNode]) -> None:
    """Assign modules: forward by the enclosing range, backward by the sequence number shared with the forward pass."""
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


def _kind(node: _OpNode) -> str:
    outer = "other" if node.parent is None else node.parent.kind
    if outer in ("optimizer", "attention", "casts"):
        return outer
    if len(set(node.op.formats)) == 2 and all(each in PRECISIONS for each in node.op.formats):
        return "casts"
    own = kind_of_op(node.op.name)
    if outer == "matrix" and own != "optimizer":
        return outer  # what runs inside a matmul is part of it
    return outer if own == "other" else own


def _of_kernels(nodes: Sequence[_OpNode], kernels: Sequence[ProfiledKernel]) -> Iterator[tuple[str, str | None, int]]:
    by_id = {node.op.id: node for node in nodes if node.op.id}
    for kernel in kernels:
        node = by_id.get(kernel.launched_by)
        kind = "other" if node is None else node.kind
        yield (
            kind_of_kernel(kernel.name) if kind == "other" else kind,
            None if node is None else node.module,
            kernel.duration,
        )


def _of_operators(nodes: Sequence[_OpNode]) -> Iterator[tuple[str, str | None, int]]:
    for node in nodes:
        # Ranges and graph nodes are time of Python and autograd, except that compiled code is one range.
        if "::" in node.op.name and not node.op.name.startswith(("ampwise::", "autograd::")):
            yield node.kind, node.module, node.own
        elif "ompiled" in node.op.name:
            yield "other", node.module, node.own


def _covered(kernels: Sequence[ProfiledKernel]) -> int:
    """Return the nanoseconds in which at least one kernel ran."""
    total, reached = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(0, end - max(kernel.start, reached))
        reached = max(reached, end)
    return total
