"""Read the profile of a step: matmul FLOPs by precision, and device time by kind."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from ampwise.watch.matmul_work import PRECISIONS, OperatorCall, is_matmul, matmul_of
from ampwise.watch.time_use import ProfiledMatmul

__all__ = ["KINDS", "OURS", "DeviceKernel", "HostOp", "Profile", "read"]

OURS = "ampwise"  # the range around ampwise's own work, which is left out
KINDS = ("matrix", "casts", "normalisation", "elementwise", "optimizer", "other")

OPTIMIZER = "Optimizer.step#"  # the range that torch's optimizers put around their step
NORMALISATION = re.compile(r"(layer|batch|group|instance|rms)_norm")
ELEMENTWISE = re.compile(
    r"^aten::_?(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|square|exp|log|abs|clamp\w*|where|masked_fill|dropout|"
    r"native_dropout|fused_dropout|relu|gelu|silu|mish|tanh|sigmoid|threshold|leaky_relu|elu|hardswish|softplus|"
    r"addcmul|addcdiv|lerp|softmax|log_softmax|foreach_\w+)(_backward|_backward_data)?_?$"
)
# Kernels of torch.compile, and the operators fused into them.
COMPILED = re.compile(r"^triton_(poi|per|red|tem|for)_fused_(\w+?)_\d+(_kernel)?$")
# Operators with matmuls inside that the profiler does not show.
CLOSED = ("aten::_cudnn_rnn", "aten::mkldnn_rnn_layer", "aten::_thnn_fused_lstm_cell", "flash_attn::", "xformers::")


class HostOp(NamedTuple):  # not a dataclass, since a step has thousands
    """An operator call on the host, with its start and end in nanoseconds."""

    call: OperatorCall
    start: int
    end: int
    thread: int = 0
    id: int = 0  # kernels refer to the call that launched them by this


class DeviceKernel(NamedTuple):
    """A kernel or copy on the device."""

    name: str
    duration: int
    launched_by: int = 0  # id of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Summary of the profiled steps."""

    products: tuple[ProfiledMatmul, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # by kind
    unknown: tuple[str, ...] = ()  # sentences on what could not be counted

    def __add__(self, other: Profile) -> Profile:
        seconds = {kind: self.seconds.get(kind, 0.0) + other.seconds.get(kind, 0.0) for kind in KINDS}
        return Profile(
            products=_summed([*self.products, *other.products]),
            seconds={kind: spent for kind, spent in seconds.items() if spent},
            unknown=tuple(dict.fromkeys([*self.unknown, *other.unknown])),
        )


@dataclass(slots=True)
class _Node:
    op: HostOp
    parent: _Node | None
    kind: str = "other"
    ours: bool = False
    inside: int = 0  # nanoseconds of the calls within it


def read(ops: Iterable[HostOp], kernels: Sequence[DeviceKernel]) -> Profile:
    """Summarize a profile. Time is that of the kernels or, if there are none, of the host's calls."""
    nodes = _nested(ops)
    for node in nodes:
        node.ours = node.op.call.name == OURS or (node.parent is not None and node.parent.ours)
        node.kind = _kind(node)
    counted, uncounted = _products([node for node in nodes if not node.ours])
    return Profile(
        products=_summed(counted),
        seconds=_seconds(nodes, kernels),
        unknown=tuple(_unknown(nodes, kernels, counted, uncounted)),
    )


def _nested(ops: Iterable[HostOp]) -> list[_Node]:
    """Return a node for each call, linked to the call around it; parents come first."""
    nodes: list[_Node] = []
    open_in: dict[int, list[_Node]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        around = open_in[op.thread]
        while around and around[-1].op.end < op.end:
            around.pop()
        parent = around[-1] if around else None
        node = _Node(op, parent)
        if parent is not None:
            parent.inside += op.end - op.start
        around.append(node)
        nodes.append(node)
    return nodes


def _kind(node: _Node) -> str:
    parent = "other" if node.parent is None else node.parent.kind
    name = node.op.call.name
    if parent == "optimizer" or name.startswith(OPTIMIZER):
        return "optimizer"
    if parent == "casts" or _is_cast(node.op.call):
        return "casts"
    if parent in ("matrix", "normalisation"):
        return parent
    own = _kind_by_name(name)
    return parent if own == "other" else own


@lru_cache(maxsize=1024)
def _kind_by_name(name: str) -> str:
    if is_matmul(name):
        return "matrix"
    if name.startswith("aten::"):
        if NORMALISATION.search(name):
            return "normalisation"
        return "elementwise" if ELEMENTWISE.match(name) else "other"
    return _kind_of_compiled(name)


def _kind_of_compiled(name: str) -> str:
    compiled = COMPILED.match(name)
    if compiled is None:
        return "other"
    template, fused = compiled.group(1, 2)
    if template == "tem":
        return "matrix"
    if fused.strip("_") == "to_copy":
        return "casts"
    return "normalisation" if NORMALISATION.search(fused) else "elementwise"


def _is_cast(call: OperatorCall) -> bool:
    """Whether the call copies a tensor from one floating-point format to another; scalars do not count."""
    if call.name != "aten::copy_" or not call.shapes or not call.shapes[0]:
        return False
    formats = call.formats[:2]
    return len(set(formats)) == 2 and all(format in PRECISIONS for format in formats)


def _products(nodes: Iterable[_Node]) -> tuple[list[ProfiledMatmul], set[str]]:
    """Return each matmul once, and the names of the operators whose FLOPs are unknown."""
    calls: dict[int, OperatorCall] = {}
    for node in nodes:
        call = node.op.call
        if not is_matmul(call.name):
            continue
        outer = _product_around(node)
        if outer is None:
            calls[id(node)] = call
        elif outer.op.call.name == call.name and id(outer) in calls:
            # Autocast cast between the two: only the inner one has the dtype it was computed in.
            del calls[id(outer)]
            calls[id(node)] = call
        # Otherwise it is part of the outer one: a convolution computed as a matmul.
    known = [(call.name, matmul_of(call)) for call in calls.values()]
    return [made for _, made in known if made is not None], {name for name, made in known if made is None}


def _product_around(node: _Node) -> _Node | None:
    above = node.parent
    while above is not None and not is_matmul(above.op.call.name):
        above = above.parent
    return above


def _seconds(nodes: Sequence[_Node], kernels: Sequence[DeviceKernel]) -> dict[str, float]:
    spent = dict.fromkeys(KINDS, 0)
    if kernels:
        by_id = {node.op.id: node for node in nodes}
        for kernel in kernels:
            node = by_id.get(kernel.launched_by)
            if node is not None and node.ours:
                continue
            kind = "other" if node is None else node.kind
            spent[_kind_of_compiled(kernel.name) if kind == "other" else kind] += kernel.duration
    else:
        for node in nodes:
            if not node.ours:
                spent[node.kind] += max(node.op.end - node.op.start - node.inside, 0)
    return {kind: nanoseconds / 1e9 for kind, nanoseconds in spent.items() if nanoseconds}


def _unknown(
    nodes: Sequence[_Node], kernels: Sequence[DeviceKernel], counted: Sequence[ProfiledMatmul], uncounted: Iterable[str]
) -> Iterator[str]:
    for name in sorted(uncounted):
        yield f"the FLOPs of {name}: its inputs are not plain matrices"
    names = {node.op.call.name for node in nodes if not node.ours}
    for name in sorted(name for name in names if name.startswith(CLOSED)):
        yield f"matmuls inside {name}: torch profiles it as one operator"
    if any(_kind_of_compiled(kernel.name) == "matrix" for kernel in kernels):
        yield "the FLOPs of matmuls that torch.compile wrote as Triton kernels"
    if kernels and not counted and not any(node.kind == "matrix" for node in nodes):
        yield "matmuls: the device ran kernels and no operator was called (a replayed CUDA graph)"
    if any(made.aligned is None for made in counted):
        yield "alignment: this torch's profiler does not record strides"


def _summed(products: Iterable[ProfiledMatmul]) -> tuple[ProfiledMatmul, ...]:
    """Merge equal matmuls; sort by FLOPs, largest first."""
    total: dict[tuple[str, str, str, bool | None], ProfiledMatmul] = {}
    for one in products:
        key = (one.op, one.shape, one.precision, one.aligned)
        before = total.get(key)
        if before is not None:
            one = replace(before, count=before.count + one.count, flops=before.flops + one.flops)
        total[key] = one
    return tuple(sorted(total.values(), key=lambda one: -one.flops))
