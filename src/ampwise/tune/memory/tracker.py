"""Run a training step on fake tensors, and track every tensor that torch makes, from its allocation to its end.

Storages count, as a view takes no memory. A storage ends when torch would free its memory, since the same references
keep it alive whether its tensors are real or fake.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampwise.trace.replay import gc_disabled
from ampwise.train.fp8_plugin import Fp8Plugin
from ampwise.train.low_bit.optimizers import has_stochastic_rounding
from ampwise.train.low_bit.pure_bf16 import PURE
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import TrainPrecision
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.pure_bf16_plugin import PureBf16Plugin
from ampwise.tune.memory.allocation_log import (
    ACTIVATIONS,
    CASTS,
    COMPENSATION,
    CUDNN,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    STATE,
    TEMPORARY,
    AllocationLog,
    Phase,
)
from ampwise.tune.memory.convolution_buffers import CONVOLUTIONS, convolution_buffers
from ampwise.tune.memory.kernel_buffers import SCRATCH
from ampwise.tune.train_case import TrainCase

FORWARD, BACKWARD, CLIP, UPDATE = "forward", "backward", "clip", "update"
FP8 = "fp8"
STEPS = 2.0  # the value an optimizer reads as its step count
TO_COPY = torch.ops.aten._to_copy.default
ITEM = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::_scaled_mm"}
)
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def track(
    case: TrainCase, precision: TrainPrecision, optimizer: Optimizer, gathered: torch.dtype | None = None
) -> AllocationLog:
    """Return the memory log of a step during training, when the optimizer has its state.

    gathered: the dtype of weights in the step, where it differs from that of the optimizer's.
    """
    plugin = PrecisionPlugin()
    if precision.pure is not None:  # convert weights to BF16
        # torchao's optimizers, modelled here, treat each parameter by itself.
        pure = replace(precision.pure, elementwise=precision.pure.elementwise or has_stochastic_rounding(optimizer))
        plugin = PureBf16Plugin([case.model], Policy(PURE), [optimizer], pure)
    elif precision.name == FP8:
        plugin = Fp8Plugin([case.model], Policy(FP8), None, torch.device("cpu"))
    plugin.install()
    for group in optimizer.param_groups:  # use foreach updates, CUDA's default, which take more memory than one by one
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    trained = case.parameters
    tracker = AllocationTracker(SCRATCH | convolution_buffers(tf32=bool(precision.tf32)))
    # Garbage collection at random times would change the log; in training, garbage is held until it is collected, too.
    with tracker, gc_disabled():
        tracker.adopt(PARAMETERS, case.model.parameters())
        tracker.adopt(INPUTS, (*case.model.buffers(), *case.tensors))
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        with tracker.reading(STEPS), plugin.step_context(optimizer):
            optimizer.step()  # creates the optimizer's state
        optimizer.zero_grad(set_to_none=True)
        tracker.adopt(COMPENSATION, plugin.rests if isinstance(plugin, PureBf16Plugin) else ())
        state = tree_leaves(list(optimizer.state.values()))
        tracker.adopt(STATE, (leaf for leaf in state if isinstance(leaf, Tensor)))
        for parameter in case.model.parameters() if gathered is not None else ():
            parameter.data = torch.empty_like(parameter, dtype=gathered)
            tracker.adopt(PARAMETERS, [parameter])
        with tracker.phase(FORWARD), PrecisionContexts(precision, "cpu").forward():
            loss = case.loss()
        with tracker.phase(BACKWARD):
            loss.backward()
        tracker.adopt(GRADIENTS, (parameter.grad for parameter in trained if parameter.grad is not None))
        with tracker.phase(CLIP):
            clip_grad_norm_(trained, 1.0, foreach=True)
        with tracker.phase(UPDATE), tracker.reading(STEPS), plugin.step_context(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tracker.log()


class AllocationTracker(TorchDispatchMode):
    """Records all allocations while active.

    >>> with AllocationTracker() as tracker, tracker.phase("forward"):
    ...     kept = torch.zeros(256) + 1
    >>> log = tracker.log()
    >>> log.peak(), log.split(len(log.events))  # of the two, the zeros were temporary
    (2048, {'activations': 1024})
    """

    def __init__(self, scratch: Mapping[Any, Callable[..., int]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch or {}  # by operator, the bytes that its kernel allocates while it runs
        self._sizes: list[int] = []
        self._kinds: list[str | None] = []
        self._events: list[int] = []
        self._phases: list[Phase] = []
        self._blocks: dict[int, int] = {}  # by the address of the storage
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stand_in: float | None = None
        self._matmuls = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # requested all the time, and slow otherwise
        if func is ITEM and self._stand_in is not None:
            return self._stand_in
        made = func(*args, **(kwargs or {}))
        self._matmuls = self._matmuls or func._schema.name in MATMULS
        kind = None
        if func is TO_COPY and made.dtype in SIXTEEN_BITS:
            source = self._blocks.get(args[0].untyped_storage()._cdata)
            kind = CASTS if source is not None and self._kinds[source] == PARAMETERS else None
        for tensor in tree_leaves(made) if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self._track(tensor, kind)
        if func in self._scratch:
            # Also for 0 bytes, so that steps of other sizes, where it is not 0, have the same events.
            kind = CUDNN if func in CONVOLUTIONS else TEMPORARY
            self._allocated(self._scratch[func](*args, **(kwargs or {})), kind)
            self._events.append(~self._events[-1])
        return made

    def adopt(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the kind of tensors, tracked or not; the first kind set for a storage stays."""
        for tensor in tensors:
            self._track(tensor, kind)
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is not None and self._kinds[block] is None:
                self._kinds[block] = kind

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside as a phase of the step."""
        start = len(self._events)
        yield
        self._phases.append(Phase(name, start, len(self._events)))

    @contextmanager
    def reading(self, value: float) -> Iterator[None]:
        """Make ``tensor.item()`` return this number: an optimizer reads its step count, which fake tensors lack."""
        self._stand_in = value
        try:
            yield
        finally:
            self._stand_in = None

    def log(self) -> AllocationLog:
        """Return the log so far."""
        log = AllocationLog(
            sizes=tuple(self._sizes),
            kinds=(),
            events=tuple(_in_order(self._events, {phase.end for phase in self._phases})),
            phases=tuple(self._phases),
            matmuls=self._matmuls,
        )
        kinds = [kind or TEMPORARY for kind in self._kinds]
        for phase in self._phases:
            if phase.name == FORWARD:
                for block in {*log.alive(phase.end)} - {*log.alive(phase.start)}:
                    kinds[block] = self._kinds[block] or ACTIVATIONS
        return replace(log, kinds=tuple(kinds))

    def _track(self, tensor: Tensor, kind: str | None) -> None:
        if tensor.layout is not torch.strided:
            return  # a sparse tensor is tracked by its parts
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = len(self._sizes)
            self._ends[storage._cdata] = weakref.ref(storage, partial(self._freed, storage._cdata))
            self._allocated(storage.nbytes(), kind)

    def _allocated(self, nbytes: int, kind: str | None) -> None:
        self._events.append(len(self._sizes))
        self._sizes.append(nbytes)
        self._kinds.append(kind)

    def _freed(self, address: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._ends[address]
        self._events.append(~self._blocks.pop(address))


def _in_order(events: list[int], marks: set[int]) -> Iterator[int]:
    """Sort blocks freed at once by number: autocast drops its copies in the order of their addresses."""
    freed: list[int] = []
    for index, event in enumerate(events):
        if index in marks or event >= 0:
            yield from sorted(freed)
            freed.clear()
        if event >= 0:
            yield event
        else:
            freed.append(event)
    yield from sorted(freed)
