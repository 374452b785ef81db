"""Read the profile of a step: matmul FLOPs by precision, and device time by kind."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ampwise.watch.time_use import ProfiledMatmul

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

PRECISIONS = {
    "double": "fp64",
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
WORD = 16  # bytes that tensor cores load at once
# Operator, and the position of the first of its two matrices among the arguments.
GEMMS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
    "aten::_scaled_mm": 0,
}
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
ATTENTION = "aten::_scaled_dot_product_"
AS_PRODUCTS = "aten::_scaled_dot_product_attention_math"  # attention that calls the matmuls above


# Matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """An operator's call: for each argument its shape, strides, dtype and, if it is not a tensor, its value."""

    name: str
    shapes: Sequence[Sequence[int]] = ()
    strides: Sequence[Sequence[int]] | None = None  # None: this torch does not record them
    formats: Sequence[str] = ()
    values: Sequence[Any] | None = None


@lru_cache(maxsize=1024)
def is_matmul(name: str) -> bool:
    """Whether the operator is one whose FLOPs are counted here."""
    return name in GEMMS or name in CONVOLUTIONS or (name.startswith(ATTENTION) and not name.startswith(AS_PRODUCTS))


def matmul_of(call: OperatorCall) -> ProfiledMatmul | None:
    """Return FLOPs, precision and alignment of what the call computed; None if its arguments do not show it."""
    backward = call.name.endswith("_backward")  # then the first argument is a gradient
    first = GEMMS.get(call.name, int(backward))  # position of the first matrix
    try:
        if call.name in GEMMS:
            shape, flops, starts = _gemm(call, first)
        elif call.name in CONVOLUTIONS:
            shape, flops, starts = _convolution(call, first)
        else:
            query, key, value = call.shapes[first : first + 3]
            batch, heads, queries, width = query
            scores, weighted = (2 * batch * heads * queries * key[2] * size for size in (width, value[3]))
            # Backward: the scores are recomputed, and there are two matmuls each for scores and values.
            flops = 3 * scores + 2 * weighted if backward else scores + weighted
            shape, starts = f"{_size(query)}, {_size(key)}", [width, value[3]]
        precision = PRECISIONS[call.formats[first]]
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # unexpected shapes: a nested tensor, an argument left out
    aligned = all(start % (WORD // BYTES[precision]) == 0 for start in starts)
    name = call.name.removeprefix("aten::")
    return ProfiledMatmul(op=name, shape=shape, precision=precision, flops=float(flops), aligned=aligned)


def _gemm(call: OperatorCall, first: int) -> tuple[str, int, list[int]]:
    """Return the shape as text, the FLOPs, and numbers of elements between starts of rows."""
    left, right = call.shapes[first : first + 2]
    # The result is stored by rows, whatever its inputs are; forward and backward together show each size of a layer.
    starts = [right[-1]]
    if call.strides is not None:
        for matrix, (*_, by_rows, by_columns) in zip((left, right), call.strides[first : first + 2], strict=True):
            rows, columns = matrix[-2:]
            if rows != 1 and columns != 1:  # a single row or column has no stride
                starts.append(by_rows if by_columns == 1 else by_columns)  # or from column to column
    return f"{_size(left)} @ {_size(right)}", 2 * math.prod(left) * right[-1], starts


def _convolution(call: OperatorCall, first: int) -> tuple[str, int, list[int]]:
    taken, weight = call.shapes[first : first + 2]
    values = call.values or ()
    *settings, transposed = values[first + 3 : first + 7]
    times = 1
    if first:  # backward
        positions = math.prod((taken if transposed else call.shapes[0])[2:])
        times = sum(map(bool, values[10][:2]))  # gradients wanted
    elif transposed:
        positions = math.prod(taken[2:])
    else:
        stride, padding, dilation = ([*given] * (len(taken) - 2 if len(given) == 1 else 1) for given in settings)
        positions = math.prod(
            (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, wide in zip(taken[2:], weight[2:], stride, padding, dilation, strict=False)
        )
    flops = 2 * taken[0] * positions * math.prod(weight) * times
    return f"{_size(taken)} * {_size(weight)}", flops, [taken[1], weight[0]]


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


# A whole profile


class HostOp(NamedTuple):  # not a dataclass, since a step has thousands
    """An operator call on the host, with its start and end in nanoseconds."""

    call: OperatorCall
    start: int
    end: int
    thread: int = 0
    id: int = 0  # kernels refer to the call that launched them by this
    number: int = -1  # sequence number of the graph node that it made, or that it runs in the backward pass
    backward: bool = False


class DeviceKernel(NamedTuple):
    """A kernel or copy on the device."""

    name: str
    duration: int
    launched_by: int = 0  # id of the call
    start: int = 0


class AttentionCall(NamedTuple):
    """Attention of one size, by one kernel."""

    op: str
    keys: int
    mask: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Summary of the profiled steps."""

    products: tuple[ProfiledMatmul, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # by kind
    unknown: tuple[str, ...] = ()  # sentences on what could not be counted
    attention: frozenset[AttentionCall] = frozenset()

    def __add__(self, other: Profile) -> Profile:
        seconds = {kind: self.seconds.get(kind, 0.0) + other.seconds.get(kind, 0.0) for kind in KINDS}
        return Profile(
            products=_summed([*self.products, *other.products]),
            seconds={kind: spent for kind, spent in seconds.items() if spent},
            unknown=tuple(dict.fromkeys([*self.unknown, *other.unknown])),
            attention=self.attention | other.attention,
        )


@dataclass(slots=True)
class CallNode:
    """A call on the host, and the call that it is in."""

    op: HostOp
    parent: CallNode | None
    kind: str = "other"
    ours: bool = False
    module: str | None = None
    inside: int = 0  # nanoseconds of the calls within it

    @property
    def name(self) -> str:
        return self.op.call.name

    @property
    def own(self) -> int:
        """Nanoseconds without those of the calls within it."""
        return max(self.op.end - self.op.start - self.inside, 0)


def read(ops: Iterable[HostOp], kernels: Sequence[DeviceKernel]) -> Profile:
    """Summarize a profile. Time is that of the kernels or, if there are none, of the host's calls."""
    nodes = nested_calls(ops)
    for node in nodes:
        node.ours = node.name == OURS or (node.parent is not None and node.parent.ours)
        node.kind = _kind(node)
    theirs = [node for node in nodes if not node.ours]
    counted, uncounted = _products(theirs)
    spent = dict.fromkeys(KINDS, 0)
    if kernels:
        by_id = {node.op.id: node for node in nodes}
        for kernel in kernels:
            launcher = by_id.get(kernel.launched_by)
            if launcher is None or not launcher.ours:
                kind = "other" if launcher is None else launcher.kind
                spent[kind_of_compiled(kernel.name) if kind == "other" else kind] += kernel.duration
    else:
        for node in theirs:
            spent[node.kind] += node.own
    unknown = [f"the FLOPs of {name}: its inputs are not plain matrices" for name in sorted(uncounted)]
    closed = {node.name for node in theirs if node.name.startswith(CLOSED)}
    unknown += [f"matmuls inside {name}: torch profiles it as one operator" for name in sorted(closed)]
    if any(kind_of_compiled(kernel.name) == "matrix" for kernel in kernels):
        unknown.append("the FLOPs of matmuls that torch.compile wrote as Triton kernels")
    if kernels and not counted and not any(node.kind == "matrix" for node in nodes):
        unknown.append("matmuls: the device ran kernels and no operator was called (a replayed CUDA graph)")
    seconds = {kind: nanoseconds / 1e9 for kind, nanoseconds in spent.items() if nanoseconds}
    attention = frozenset(found for node in theirs if (found := _attention_call(node.op.call)) is not None)
    return Profile(products=_summed(counted), seconds=seconds, unknown=tuple(unknown), attention=attention)


def _attention_call(call: OperatorCall) -> AttentionCall | None:
    if not call.name.startswith(ATTENTION) or call.name.endswith("_backward") or len(call.shapes) < 4:
        return None
    key, fourth = call.shapes[1], call.shapes[3]  # the fourth is the mask, or a number
    return AttentionCall(call.name.removeprefix("aten::"), key[-2] if len(key) > 1 else 0, mask=bool(fourth))


def nested_calls(ops: Iterable[HostOp]) -> list[CallNode]:
    """Return a node for each call, linked to the call around it; parents come first."""
    nodes: list[CallNode] = []
    open_in: dict[int, list[CallNode]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        around = open_in[op.thread]
        while around and around[-1].op.end < op.end:
            around.pop()
        parent = around[-1] if around else None
        node = CallNode(op, parent)
        if parent is not None:
            parent.inside += op.end - op.start
        around.append(node)
        nodes.append(node)
    return nodes


def _kind(node: CallNode) -> str:
    parent = "other" if node.parent is None else node.parent.kind
    if parent == "optimizer" or node.name.startswith(OPTIMIZER):
        return "optimizer"
    if parent == "casts" or is_cast(node.op.call):
        return "casts"
    if parent in ("matrix", "normalisation"):
        return parent
    own = _kind_by_name(node.name)
    return parent if own == "other" else own


def is_cast(call: OperatorCall) -> bool:
    """Whether it copies a tensor from one floating-point format to another; a single number costs nothing."""
    return (
        call.name == "aten::copy_"
        and bool(call.shapes and call.shapes[0])
        and len(set(call.formats[:2])) == 2
        and all(format in PRECISIONS for format in call.formats[:2])
    )


@lru_cache(maxsize=1024)
def _kind_by_name(name: str) -> str:
    if is_matmul(name):
        return "matrix"
    if not name.startswith("aten::"):
        return kind_of_compiled(name)
    if NORMALISATION.search(name):
        return "normalisation"
    return "elementwise" if ELEMENTWISE.match(name) else "other"


def kind_of_compiled(name: str) -> str:
    """Return the kind of a kernel that torch.compile wrote; "other" for other names."""
    compiled = COMPILED.match(name)
    if compiled is None:
        return "other"
    template, fused = compiled.group(1, 2)
    if template == "tem":
        return "matrix"
    if fused.strip("_") == "to_copy":
        return "casts"
    return "normalisation" if NORMALISATION.search(fused) else "elementwise"


def _products(nodes: Iterable[CallNode]) -> tuple[list[ProfiledMatmul], set[str]]:
    """Return each matmul once, and the names of the operators whose FLOPs are unknown."""
    calls: dict[int, OperatorCall] = {}
    for node in nodes:
        call, outer = node.op.call, node.parent
        if not is_matmul(call.name):
            continue
        while outer is not None and not is_matmul(outer.name):
            outer = outer.parent
        if outer is None:
            calls[id(node)] = call
        elif outer.name == call.name and id(outer) in calls:
            # Autocast cast between the two: only the inner one has the dtype it was computed in.
            del calls[id(outer)]
            calls[id(node)] = call
        # Otherwise it is part of the outer one: a convolution computed as a matmul.
    known = [(call.name, matmul_of(call)) for call in calls.values()]
    return [made for _, made in known if made is not None], {name for name, made in known if made is None}


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
