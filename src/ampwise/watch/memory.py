"""Memory of parameters, gradients and optimizer state, counted from tensor metadata without a sync."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ampwise.watch.inspection import dtype_name, parameters_of, tensors_in

__all__ = ["OptimizerMemory", "TensorBlock", "memory_facts"]

KINDS = ("parameters", "buffers", "gradients", "optimizer")


class TensorBlock(NamedTuple):
    """A block of memory, and what it is used for."""

    kind: str
    dtype: str
    device: str
    bytes: int
    is_counter: bool = False  # an optimizer's step counter, which may be on the host


class OptimizerMemory:
    """Memory of each optimizer's tensors and models, counted once, at the end of its first step."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, dict[Hashable, TensorBlock]]] = {}

    def take(self, index: int, optimizer: Any, models: Callable[[], Iterable[nn.Module]] = tuple) -> None:
        """Count an optimizer's memory while it has gradients and state. models: those it trains, with frozen parts."""
        if index in self._held:
            return
        # Optimizers that are gone have freed their memory.
        self._held = {key: held for key, held in self._held.items() if held[0]() is not None}
        blocks: dict[Hashable, TensorBlock] = {}
        self._held[index] = (ref(optimizer), blocks)  # set first: if counting fails, it is not tried again
        for each in parameters_of(optimizer):
            blocks.update(_in_memory(each, "parameters"))
            if isinstance(each.grad, Tensor):
                # Keyed by parameter: a gradient may be allocated where a freed one was.
                blocks.update(_in_memory(each.grad, "gradients", id(each)))
        for tensor in tensors_in(dict(getattr(optimizer, "state", {}))):
            blocks.update(_in_memory(tensor, "optimizer", index))
        for model in models():
            for parameter in nn.Module.parameters(model):  # a subclass may override it
                blocks.update(_in_memory(parameter, "parameters"))
            for buffer in nn.Module.buffers(model):
                blocks.update(_in_memory(buffer, "buffers"))

    def facts(self) -> dict[str, Any]:
        """Return the memory use at the end of a run. Torch's peak counters are not reset."""
        blocks: dict[Hashable, TensorBlock] = {}
        for _, held in self._held.values():
            blocks |= held
        peaks, host_peak = {}, None
        for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
            with contextlib.suppress(RuntimeError, AssertionError):  # a device that has failed
                if allocated := torch.cuda.max_memory_allocated(index):  # this process has used it
                    peaks[f"cuda:{index}"] = {
                        "peak_allocated": allocated,
                        "peak_reserved": torch.cuda.max_memory_reserved(index),
                        "total": torch.cuda.get_device_properties(index).total_memory,
                    }
        with contextlib.suppress(ImportError):  # not on Windows
            import resource

            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            host_peak = most if sys.platform == "darwin" else most * 1024
        return memory_facts(blocks.values(), peaks, host_peak)

    def not_measured(self) -> list[str]:
        return [] if self._held else ["Memory of weights, gradients and optimizer state: no optimizer step was seen."]


def memory_facts(
    blocks: Collection[TensorBlock], peaks: Mapping[str, Mapping[str, int]], host_peak: int | None
) -> dict[str, Any]:
    """Return bytes as plain data. "rest" is the other part of a device's peak, given if all blocks are on it."""
    found: dict[str, Any] = {kind: {} for kind in KINDS} if blocks else {}
    for block in blocks:
        found[block.kind][block.dtype] = found[block.kind].get(block.dtype, 0) + block.bytes
    found["devices"] = {}
    for name, peak in peaks.items():
        here = [block for block in blocks if block.device == name]
        row = {**peak, **{kind: sum(block.bytes for block in here if block.kind == kind) for kind in KINDS}}
        rest = peak["peak_allocated"] - sum(block.bytes for block in here)
        if here and rest >= 0 and all(block.device == name or block.is_counter for block in blocks):
            row["rest"] = rest
        found["devices"][name] = row
    return found | {"host_peak": host_peak}


def _in_memory(tensor: Tensor, kind: str, owner: int = 0) -> Iterator[tuple[Hashable, TensorBlock]]:
    """Yield a tensor's blocks with their keys: a tensor that has two names is counted once."""
    for plain in _plain_parts(tensor):
        if not plain.numel():
            continue
        taken = min(plain.numel() * plain.element_size(), plain.untyped_storage().nbytes())
        block = TensorBlock(kind, dtype_name(plain.dtype), str(plain.device), taken, plain.numel() == 1)
        yield (kind, owner, block.device, plain.data_ptr()), block


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in memory: the local shard of a DTensor, the parts of a sparse or quantized tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for inner in [getattr(tensor, name) for name in names]:
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from _plain_parts(inner)
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout == torch.strided:
        yield tensor
