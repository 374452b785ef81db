"""Profile a step, and summarize the device's time by kind of work and by module."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median, median_high
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from ampwise.train.precision.policy import named_modules
from ampwise.train.precision.policy_table import ANY
from ampwise.tune.bench.lineup import Contender
from ampwise.tune.bench.speeds import BASE, KINDS, LayerTime, TimeSplit
from ampwise.watch.patches import Patches
from ampwise.watch.profile import (
    BYTES,
    OPTIMIZER,
    CallNode,
    DeviceKernel,
    HostOp,
    is_cast,
    is_matmul,
    kind_of_compiled,
    nested_calls,
)
from ampwise.watch.profiler import Profiler
from ampwise.watch.time_use import ProfiledMatmul

SCOPE = "ampwise::module::"  # prefix of the ranges of modules
UPDATE = "ampwise::update"  # a range over clipping and the optimizer
OUTSIDE = "(outside the model)"
ROOT = "(the model itself)"
NO_TIME = 1e-9  # seconds: a module without work of its own
NEXT_TO_NOTHING = 1e-3  # of a step
ENOUGH = 0.5  # of the FLOPs have to be in matmuls of known shape
ATTENTION = re.compile(r"attention|flash_attn|fmha|flash_fwd|flash_bwd|sdpa", re.IGNORECASE)
COPIES = re.compile(r"^aten::(copy_|clone|contiguous|cat|_to_copy|stack)$")
# For kernels that no operator launched; the others get their kind from the operator.
KERNELS = {
    "attention": ATTENTION,
    "matrix": re.compile(r"gemm|cutlass|cublas|xmma|wgrad|dgrad|fprop|implicit_con|conv2d", re.IGNORECASE),
    "copies": re.compile(r"^Mem(cpy|set)|copy_kernel|CatArrayBatchedCopy"),
    "elementwise": re.compile(r"elementwise|reduce|norm|softmax|embedding|multi_tensor", re.IGNORECASE),
}


# --- running a step --------------------------------------------------------------------------------------------------


def profiled_step(contender: Contender) -> Any:
    """Return the profiler's record of a step, with a range for each module unless compiled: hooks would recompile it.

    Call it in the contender's turn.
    """
    step, device = contender.step, contender.step.case.device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    patches = Patches()
    try:
        with nullcontext() if contender.compiled else _module_ranges(step.case.model):
            profiler = Profiler(patches)
            synchronize(device)
            profiler.start()
            try:
                step.forward_and_backward()
                with record_function(UPDATE):
                    step.update()
                synchronize(device)
            finally:
                recorded = profiler.stop()
    finally:
        patches.undo()
    return recorded


@contextmanager
def _module_ranges(model: nn.Module) -> Iterator[None]:
    """Record a range with the module's name for each call of a module."""
    opened: list[Any] = []

    def enters(name: str) -> Any:
        def enter(*_: Any) -> None:
            opened.append(record_function(f"{SCOPE}{name}"))
            opened[-1].__enter__()

        return enter

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    hooks = []
    for name, module in named_modules(model).items():
        hooks.append(module.register_forward_pre_hook(enters(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while opened:  # of a forward pass that failed
            leave()


# --- reading its profile ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """Seconds of device time; of operators on the CPU where no kernels were launched."""

    split: TimeSplit
    modules: dict[str, float] = field(default_factory=dict)


def summarize(ops: Iterable[HostOp], kernels: Sequence[DeviceKernel]) -> ProfileSummary:
    """Sum up a step's time by kind and by module."""
    nodes = nested_calls(ops)
    for node in nodes:
        node.kind = _kind(node)
    _name_modules(nodes)
    spent = list(_time_spent(nodes, kernels))
    kinds, modules = dict.fromkeys(KINDS, 0.0), defaultdict[str, float](float)
    for kind, module, nanoseconds in spent:
        kinds[kind] += nanoseconds / 1e9
        if kind != "optimizer":
            modules[OUTSIDE if module is None else module] += nanoseconds / 1e9
    busy = 0 if kernels else sum(nanoseconds for _, _, nanoseconds in spent)
    reached = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):  # time in which at least one ran
        end = kernel.start + kernel.duration
        busy += max(0, end - max(kernel.start, reached))
        reached = max(reached, end)
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


def _kind(node: CallNode) -> str:
    outer = "other" if node.parent is None else node.parent.kind
    if outer in ("optimizer", "attention", "casts"):
        return outer
    if is_cast(node.op.call):
        return "casts"
    own = kind_of_op(node.name)
    if outer == "matrix" and own != "optimizer":
        return outer  # what runs inside a matmul is part of it
    return outer if own == "other" else own


def _name_modules(nodes: Sequence[CallNode]) -> None:
    """Assign modules: forward by the enclosing range, backward by the sequence number shared with the forward pass."""
    made_by: dict[int, str] = {}
    for node in nodes:
        if node.name.startswith(SCOPE):
            node.module = node.name.removeprefix(SCOPE)
        elif node.parent is not None:
            node.module = node.parent.module
        if node.module is not None and node.op.number >= 0 and not node.op.backward:
            made_by[node.op.number] = node.module  # the last one: those before it made no node
    for node in nodes:
        if node.op.backward:
            node.module = made_by.get(node.op.number)
        elif node.module is None and node.parent is not None:
            node.module = node.parent.module


def _time_spent(nodes: Sequence[CallNode], kernels: Sequence[DeviceKernel]) -> Iterator[tuple[str, str | None, int]]:
    """Yield kind, module and nanoseconds of each kernel; without any, of each operator without those inside it."""
    if kernels:
        by_id = {node.op.id: node for node in nodes if node.op.id}
        for kernel in kernels:
            node = by_id.get(kernel.launched_by)
            kind = "other" if node is None else node.kind
            module = None if node is None else node.module
            yield kind_of_kernel(kernel.name) if kind == "other" else kind, module, kernel.duration
        return
    for node in nodes:
        # Ranges and graph nodes are time of Python and autograd, except that compiled code is one range.
        if "::" in node.name and not node.name.startswith(("ampwise::", "autograd::")):
            yield node.kind, node.module, node.own
        elif "ompiled" in node.name:
            yield "other", node.module, node.own


# --- kinds of work, by name ------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def kind_of_op(name: str) -> str:
    """Return one of KINDS by the name of an operator, or "other" for what is not work: a range, a node of the graph.

    >>> kind_of_op("aten::addmm"), kind_of_op("aten::gelu"), kind_of_op("aten::scaled_dot_product_attention")
    ('matrix', 'elementwise', 'attention')
    """
    if name.startswith((OPTIMIZER, UPDATE)):
        return "optimizer"
    if name.startswith(("aten::", "flash_attn")):
        if ATTENTION.search(name):
            return "attention"
        if is_matmul(name):
            return "matrix"
        return "copies" if COPIES.match(name) else "elementwise"
    return _kind_of_compiled(name)


@lru_cache(maxsize=4096)
def kind_of_kernel(name: str) -> str:
    """Return one of KINDS by the name of a kernel, or "other".

    >>> kind_of_kernel("sm90_xmma_gemm_bf16bf16_bf16f32"), kind_of_kernel("triton_poi_fused_gelu_3")
    ('matrix', 'elementwise')
    """
    compiled = _kind_of_compiled(name)
    if compiled != "other":
        return compiled
    return next((kind for kind, pattern in KERNELS.items() if pattern.search(name)), "other")


def _kind_of_compiled(name: str) -> str:
    found = kind_of_compiled(name)
    return "elementwise" if found == "normalisation" else found


# --- layers and matmuls ----------------------------------------------------------------------------------------------


def layer_times(
    model: nn.Module,
    modules: Mapping[str, Mapping[str, float]],
    step_s: Mapping[str, float],
    *,
    certain: bool = True,
) -> tuple[LayerTime, ...]:
    """Return times by layer; the slowest in FP32 come first.

    ``modules`` holds seconds by row label and module name; ``step_s`` seconds of a step by label. Ratios of layers that
    take next to nothing of a step are marked uncertain.
    """
    named = named_modules(model)
    alike: dict[tuple[str, str], list[str]] = {}  # names of modules, by pattern and class
    for name in dict.fromkeys(name for seconds in modules.values() for name in seconds):
        path = ".".join(ANY if part.isdigit() else part for part in name.split("."))
        key = (OUTSIDE, "") if name == OUTSIDE else (path or ROOT, type(named[name]).__name__)
        alike.setdefault(key, []).append(name)
    found = []
    for (pattern, kind), names in alike.items():
        seconds = {label: sum(times.get(name, 0.0) for name in names) for label, times in modules.items()}
        if max(seconds.values()) > NO_TIME:
            notable = any(each >= NEXT_TO_NOTHING * step_s.get(label, 0.0) for label, each in seconds.items())
            layer = LayerTime(name=pattern, kind=kind, times=len(names), seconds=seconds, certain=certain and notable)
            found.append(layer)
    return tuple(sorted(found, key=lambda layer: -layer.seconds.get(BASE, max(layer.seconds.values()))))


def intensity_of(products: Iterable[ProfiledMatmul]) -> float | None:
    """Return FLOPs per byte read or written by matmuls; None where most of the work is elsewhere, as in convolutions.

    >>> one = ProfiledMatmul(op="mm", shape="1×4096 @ 4096×4096", precision="bf16", flops=2.0 * 4096**2)
    >>> round(intensity_of([one]), 1)
    1.0
    """
    all_flops = flops = moved = 0.0
    for product in products:
        all_flops += product.flops
        left, at, right = product.shape.partition(" @ ")
        if at:
            one, other = ([int(size) for size in part.split("×")] for part in (left, right))
            elements = math.prod(one) + math.prod(other) + math.prod(one[:-1]) * other[-1]  # factors and product
            flops += product.flops
            moved += product.count * elements * BYTES[product.precision]
    return flops / moved if moved and flops >= ENOUGH * all_flops else None
