"""What takes up memory in training: counted from what tensors say of themselves, without asking a device to wait."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ampwise.watch.asking import dtype_name, parameters_of, tensors_in

__all__ = ["Block", "Memory", "memory_facts"]

KINDS = ("parameters", "buffers", "gradients", "optimizer")


class Block(NamedTuple):
    """A stretch of memory, and what it is for."""

    kind: str
    dtype: str
    device: str
    bytes: int
    is_counter: bool = False  # of an optimizer's steps, which it may keep on the host


class Memory:
    """What optimizers hold, each counted once, at the end of the first step that it has taken."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, dict[Hashable, Block]]] = {}

    def take(self, index: int, optimizer: Any, models: Callable[[], Iterable[nn.Module]] = tuple) -> None:
        """Its gradients are still there, and by now its state is. models: those it trains, frozen parts and all."""
        if index not in self._held:
            # Those that are gone have given their memory back.
            self._held = {key: held for key, held in self._held.items() if held[0]() is not None}
            self._held[index] = (ref(optimizer), {})  # first: where it fails, it fails once
            self._held[index][1].update(_blocks(index, optimizer))
            for model in models():
                self._held[index][1].update(_parts_of(model))

    def facts(self) -> dict[str, Any]:
        """At the end of a run. It leaves the peaks of the script's own counting as they are."""
        blocks: dict[Hashable, Block] = {}
        for _, held in self._held.values():
            blocks |= held
        return memory_facts(blocks.values(), _peaks(), _host_peak())

    def not_measured(self) -> list[str]:
        return [] if self._held else ["Memory of weights, gradients and optimizer state: no step was seen to be taken."]


def memory_facts(
    blocks: Collection[Block], peaks: Mapping[str, Mapping[str, int]], host_peak: int | None
) -> dict[str, Any]:
    """Bytes as plain data. "rest" is what a device's peak has besides, where all that is known of lies on it."""
    found: dict[str, Any] = {kind: _by_dtype(blocks, kind) for kind in KINDS} if blocks else {}
    found["devices"] = {name: _device(blocks, name, peak) for name, peak in peaks.items()}
    return found | {"host_peak": host_peak}


def _by_dtype(blocks: Collection[Block], kind: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for block in blocks:
        if block.kind == kind:
            sums[block.dtype] = sums.get(block.dtype, 0) + block.bytes
    return sums


def _device(blocks: Collection[Block], name: str, peak: Mapping[str, int]) -> dict[str, int]:
    here = [block for block in blocks if block.device == name]
    row = {**peak, **{kind: sum(block.bytes for block in here if block.kind == kind) for kind in KINDS}}
    rest = peak["peak_allocated"] - sum(block.bytes for block in here)
    if here and rest >= 0 and all(block.device == name or block.is_counter for block in blocks):
        row["rest"] = rest
    return row


def _blocks(index: int, optimizer: Any) -> Iterator[tuple[Hashable, Block]]:
    parameters = parameters_of(optimizer)
    for each in parameters:
        yield from _in_memory(each, "parameters")
        if isinstance(each.grad, Tensor):
            # By parameter: gradients come and go, and the next may lie where another was.
            yield from _in_memory(each.grad, "gradients", id(each))
    for tensor in tensors_in(dict(getattr(optimizer, "state", {}))):
        yield from _in_memory(tensor, "optimizer", index)


def _parts_of(model: nn.Module) -> Iterator[tuple[Hashable, Block]]:
    for parameter in nn.Module.parameters(model):  # a script may have its own of that name
        yield from _in_memory(parameter, "parameters")
    for buffer in nn.Module.buffers(model):
        yield from _in_memory(buffer, "buffers")


def _in_memory(tensor: Tensor, kind: str, owner: int = 0) -> Iterator[tuple[Hashable, Block]]:
    """The blocks of a tensor, each under what tells it from others: two names for one are counted once."""
    for plain in _plain_parts(tensor):
        if not plain.numel():
            continue
        taken = min(plain.numel() * plain.element_size(), plain.untyped_storage().nbytes())
        block = Block(kind, dtype_name(plain.dtype), str(plain.device), taken, plain.numel() == 1)
        yield (kind, owner, block.device, plain.data_ptr()), block


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """What is in memory here: the local part of one that is shared out, the values of a sparse or a quantized one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout == torch.strided:
        yield tensor


def _peaks() -> dict[str, dict[str, int]]:
    """Of the CUDA devices that this process has used."""
    if not torch.cuda.is_initialized():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        with contextlib.suppress(RuntimeError, AssertionError):  # a device that has failed
            if allocated := torch.cuda.max_memory_allocated(index):
                found[f"cuda:{index}"] = {
                    "peak_allocated": allocated,
                    "peak_reserved": torch.cuda.max_memory_reserved(index),
                    "total": torch.cuda.get_device_properties(index).total_memory,
                }
    return found


def _host_peak() -> int | None:
    """The most that this process has had in the host's memory; None where nobody counts."""
    with contextlib.suppress(ImportError):  # there is none on Windows
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return None
