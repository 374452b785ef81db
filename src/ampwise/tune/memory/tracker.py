"""Track every tensor that torch makes, from its allocation to its end.

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
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.tune.memory.allocation_log import ACTIVATIONS, CASTS, PARAMETERS, TEMPORARY, AllocationLog, Phase

__all__ = ["FORWARD", "AllocationTracker", "Scratch"]

FORWARD = "forward"
TO_COPY = torch.ops.aten._to_copy.default
ITEM = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
SIXTEEN_BITS = (torch.float16, torch.bfloat16)

# Bytes that a kernel allocates while it runs, from its arguments.
Scratch = Callable[..., int]


class AllocationTracker(TorchDispatchMode):
    """Records all allocations while active.

    >>> with AllocationTracker() as tracker, tracker.phase("forward"):
    ...     kept = torch.zeros(256) + 1
    >>> log = tracker.log()
    >>> log.peak(), log.split(len(log.events))  # of the two, the zeros were temporary
    (2048, {'activations': 1024})
    """

    def __init__(self, scratch: Mapping[Any, Scratch] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch or {}
        self._sizes: list[int] = []
        self._kinds: list[str | None] = []
        self._events: list[int] = []
        self._phases: list[Phase] = []
        self._blocks: dict[int, int] = {}  # by the address of the storage
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stand_in: float | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # requested all the time, and slow otherwise
        if func is ITEM and self._stand_in is not None:
            return self._stand_in
        made = func(*args, **(kwargs or {}))
        kind = CASTS if func is TO_COPY and self._is_weight_cast(args[0], made) else None
        for tensor in _tensors(made):
            self._track(tensor, kind)
        if func in self._scratch:
            self._allocate_briefly(self._scratch[func](*args, **(kwargs or {})))
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
            kinds=(TEMPORARY,) * len(self._sizes),
            events=tuple(_in_order(self._events, {phase.end for phase in self._phases})),
            phases=tuple(self._phases),
        )
        return replace(log, kinds=tuple(map(_kind, self._kinds, log.outliving(FORWARD))))

    def _track(self, tensor: Tensor, kind: str | None) -> None:
        if tensor.layout is not torch.strided:
            return  # a sparse tensor is tracked by its parts
        storage = tensor.untyped_storage()
        if storage._cdata in self._blocks:
            return
        block = len(self._sizes)
        self._blocks[storage._cdata] = block
        self._ends[storage._cdata] = weakref.ref(storage, partial(self._freed, storage._cdata))
        self._allocated(storage.nbytes(), kind)

    def _allocated(self, nbytes: int, kind: str | None) -> int:
        self._events.append(len(self._sizes))
        self._sizes.append(nbytes)
        self._kinds.append(kind)
        return len(self._sizes) - 1

    def _freed(self, address: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._ends[address]
        self._events.append(~self._blocks.pop(address))

    def _allocate_briefly(self, nbytes: int) -> None:
        # Also for 0 bytes, so that steps of other sizes, where it is not 0, have the same events.
        self._events.append(~self._allocated(nbytes, TEMPORARY))

    def _is_weight_cast(self, source: Tensor, made: Tensor) -> bool:
        block = self._blocks.get(source.untyped_storage()._cdata)
        return block is not None and self._kinds[block] == PARAMETERS and made.dtype in SIXTEEN_BITS


def _kind(known: str | None, outlives_forward: bool) -> str:
    return known or (ACTIVATIONS if outlives_forward else TEMPORARY)


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


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for part in made:
            yield from _tensors(part)
