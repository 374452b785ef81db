"""Record every operation that torch runs, forward and backward, on a tape; and restore what a replay overwrites.

The tape does not keep tensors, only their smallest and largest values (a slot of ``ValueRanges``) and their
``RecordedStorage``: an operation may overwrite its input, or write into a part of another tensor's storage that a view
reads later.

Memory is copied only when an operation is about to write to it: running statistics, a batch that is changed in place,
gradients that are accumulated. Memory that the replay itself allocates is not copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.finding.call_site import CallSite
from ampwise.numbers.op_families import base_name, is_collective
from ampwise.trace.call_site import current_line, is_recomputed, site_of
from ampwise.trace.module_paths import ModulePaths
from ampwise.trace.value_ranges import ALWAYS_FINITE, ValueRanges, has_storage, local_shard

__all__ = [
    "OpRecorder",
    "RecordedOp",
    "RecordedStorage",
    "Tape",
    "TensorRead",
    "TensorWrite",
    "UndoMode",
    "dtype_name",
    "overwrite",
    "result_tensors",
    "storage_id",
    "tensors_in",
    "written_arguments",
]

# Operations that return a view of their input, and arguments that operations write to, although no schema says so.
UNDECLARED_VIEWS = ("aten._unsafe_view.", "aten._reshape_alias.", "aten.lift_fresh.", "aten.alias.")
UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
NO_SEQUENCE = 2**63  # from here on, the sequence number of autograd nodes that belong to no operation
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


# The tape


class TensorWrite(NamedTuple):
    """A write of an operation to a storage."""

    op: int
    slot: int


@dataclass(slots=True, eq=False)
class RecordedStorage:
    """A tensor storage, from its first use on."""

    leaf: Tensor | None = None  # a tensor that existed before: a weight, the batch, a constant
    address: StorageWeakRef | None = None  # keeps the address from being reused by a tensor that is made later
    writers: list[TensorWrite] = field(default_factory=list)
    measured: dict[object, tuple[int, int]] = field(default_factory=dict)  # by view: number of writers then, slot


class TensorRead(NamedTuple):
    """A read of a storage by an operation."""

    storage: RecordedStorage
    writers: int  # how many operations had written to it by then
    slot: int


@dataclass(slots=True, eq=False)
class RecordedOp:
    """A recorded operation."""

    index: int
    name: str  # "aten.addmm.default"
    dtype: str  # of its first result
    inputs: tuple[TensorRead, ...]
    outputs: tuple[int, ...]  # slots
    scalars: tuple[float, ...] = ()  # Python floats among its arguments
    site: CallSite = field(default_factory=CallSite)
    live: bool = True  # the line itself was running; False: the line is that of the forward operation
    phase: str = "forward"
    module: str = ""
    module_class: str = ""
    forward: int | None = None  # for a backward operation, the index of its forward operation


class Tape:
    """All recorded operations, and the value ranges of their tensors."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self.ranges = ValueRanges()
        self.has_modules = False

    def made(self, op: RecordedOp) -> str:
        """Return what is bad in an operation's results: "nan", "inf" or ""."""
        return max(map(self.ranges.bad, op.outputs), default="")  # "nan" is the largest of these words

    def was_given_bad(self, op: RecordedOp) -> bool:
        """Return whether one of the inputs was not finite."""
        return any(self.ranges.bad(given.slot) for given in op.inputs)


# Tensors


def tensors_in(things: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    for each in things:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (inner for inner in each if isinstance(inner, Tensor))


def result_tensors(result: Any) -> list[Tensor]:
    """Return the tensors that an operation returned."""
    return list(tensors_in(result if isinstance(result, list | tuple) else (result,)))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ampwise's name of a dtype: "fp16"; torch's name for one that is no floating-point format: "int64"."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.").replace("float8", "fp8").removesuffix("fn")


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage."""
    inner = local_shard(tensor)
    try:
        return int(inner.untyped_storage()._cdata) if inner.layout == torch.strided else id(inner)
    except (NotImplementedError, RuntimeError):
        return id(inner)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor without bumping its version: autograd would reject a saved tensor that changed."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
        tensor.copy_(values)


# Operations


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """Facts about an operation from its schema."""

    name: str
    writes: tuple[tuple[int, str], ...]
    is_view: bool
    draws: bool  # random numbers, maybe from the user's own generator
    is_filled_later: bool  # its result has no values yet: scratch memory, or a collective's output

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the arguments that the operation will write to."""
        given = (args[position] if position < len(args) else kwargs.get(name) for position, name in self.writes)
        return list(tensors_in(given))


@lru_cache(maxsize=8192)
def _op_facts(func: Any) -> _OpFacts:
    name, schema = str(func), func._schema
    aliased = [each.alias_info for each in schema.returns]
    is_view = bool(aliased) and all(info is not None and not info.is_write for info in aliased)
    return _OpFacts(
        name=name,
        writes=written_arguments(func),
        is_view=is_view or name.startswith(UNDECLARED_VIEWS),
        draws=any("Generator" in str(argument.type) for argument in schema.arguments),
        is_filled_later=is_collective(name) or "empty" in base_name(name),
    )


@lru_cache(maxsize=4096)
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operation writes to."""
    schema = func._schema
    quiet = "batch_norm" in schema.name and "backward" not in schema.name
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (quiet and argument.name in UNDECLARED_WRITES)
    )


class LeafGradient(NamedTuple):
    """A leaf tensor that requires gradients, and the gradient it had."""

    tensor: Tensor
    gradient: Tensor | None


class UndoMode(TorchDispatchMode):
    """Dispatch mode that saves what a replay overwrites, so that it can be restored; records nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves: dict[int, LeafGradient] = {}  # leaf tensors that were read, by id
        self._copies: dict[object, tuple[Tensor, Tensor, _unsafe_preserve_version_counter]] = {}  # overwritten memory
        self._made: set[int] = set()  # storages that the replay allocated
        self._generators: dict[torch.Generator, Tensor] = {}  # the user's own generators, and their states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _op_facts(func)
        for tensor in tensors_in(args):
            self.note_leaf(tensor)
        if facts.is_view:
            return func(*args, **kwargs)
        if facts.draws:
            self.note_generators(kwargs)
        written = facts.written(args, kwargs) if facts.writes else []
        for tensor in written:
            if storage_id(tensor) not in self._made:
                self.note_write(tensor)
        result = self.run(func, args, kwargs)
        # A batch norm writes to its statistics and returns a new tensor; other operations return what they wrote to.
        made = set(map(storage_id, result_tensors(result)))
        self._made |= made.difference(map(storage_id, written)) if written else made
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a replay, and dynamo's wrapper would cost time at each operation

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; subclasses override it to inspect some."""
        return func(*args, **kwargs)

    def note_generators(self, kwargs: Any) -> None:
        """Save the state of the generators among an operation's arguments."""
        for each in kwargs.values():
            if isinstance(each, torch.Generator) and each not in self._generators:
                self._generators[each] = each.get_state()

    def note_leaf(self, tensor: Tensor) -> None:
        """Save the gradient of a leaf tensor."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.leaves:
            self.leaves[id(tensor)] = LeafGradient(tensor, tensor.grad)

    def note_write(self, tensor: Tensor) -> None:
        """Copy a tensor that an operation is about to overwrite."""
        inner = local_shard(tensor)
        if not has_storage(inner):
            return
        key = (id(inner), *((inner.data_ptr(), inner.shape, inner.stride()) if inner.layout == torch.strided else ()))
        if key not in self._copies:
            # It may be saved for another backward pass, which would reject a tensor that changed.
            self._copies[key] = inner, inner.detach().clone(), _unsafe_preserve_version_counter(inner)

    def put_back(self) -> None:
        """Restore all memory that was written to, the latest first, the gradients of leaf tensors, and generators."""
        for tensor, copy, version in reversed(self._copies.values()):
            with torch.no_grad(), version:
                if has_storage(tensor):
                    tensor.copy_(copy)
        self._copies.clear()
        for leaf, gradient in self.leaves.values():
            leaf.grad = gradient
        for generator, state in self._generators.items():
            generator.set_state(state)


class OpRecorder(UndoMode):
    """Dispatch mode that records all operations on a tape."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.tape = Tape()
        self._paths = paths
        self._storages: dict[int, RecordedStorage] = {}
        self._by_sequence: dict[int, list[int]] = {}  # forward operations by the sequence number of their autograd node
        self._threads: dict[int, int] = {}  # the last sequence number, by thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _op_facts(func)
        if facts.is_view:  # its storage is known already
            for tensor in tensors_in(args):
                self.note_leaf(tensor)
            return func(*args, **kwargs)
        given = tuple(self.given(tensor) for tensor in tensors_in((*args, *kwargs.values())))
        written = facts.written(args, kwargs)
        for tensor in written:
            if self._storages[storage_id(tensor)].leaf is not None:
                self.note_write(tensor)
        if facts.draws:
            self.note_generators(kwargs)
        index = len(self.tape.ops)
        result = func(*args, **kwargs)
        made = result_tensors(result)
        op = RecordedOp(
            index=index,
            name=facts.name,
            dtype=next((dtype_name(tensor.dtype) for tensor in (*made, *tensors_in(args))), ""),
            inputs=given,
            outputs=self._record_results(index, given, written, made, unmeasured=facts.is_filled_later),
            scalars=tuple(each for each in (*args, *kwargs.values()) if isinstance(each, float)),
        )
        self._place(op)
        self.tape.ops.append(op)
        return result

    def given(self, tensor: Tensor) -> TensorRead:
        """Return a tensor's current state; measure it unless its storage is unchanged since the last measurement."""
        inner = local_shard(tensor)
        storage = self._storages.get(storage_id(inner))
        if storage is None:
            storage = self._storages[storage_id(inner)] = RecordedStorage(leaf=inner)
        self.note_leaf(tensor)
        view = _view_of(inner)
        known = storage.measured.get(view)
        if known is None or known[0] != len(storage.writers):
            known = storage.measured[view] = (len(storage.writers), self.tape.ranges.add(inner))
        return TensorRead(storage, *known)

    def _record_results(
        self, index: int, given: tuple[TensorRead, ...], written: list[Tensor], made: list[Tensor], *, unmeasured: bool
    ) -> tuple[int, ...]:
        """Record what the operation wrote, and return the slots of its results."""
        taken = {id(each.storage) for each in given}
        overwritten = {id(local_shard(each)) for each in written}
        slots = []
        for inner in {id(each): each for each in map(local_shard, (*made, *written))}.values():
            storage = self._storages.get(storage_id(inner))
            is_written = id(inner) in overwritten
            if storage is not None and id(storage) in taken and not is_written:
                continue  # a view of an input, although the schema does not say so
            if storage is None or not is_written:
                storage = self._storages[storage_id(inner)] = RecordedStorage()
                with suppress(NotImplementedError, RuntimeError):
                    storage.address = StorageWeakRef(inner.untyped_storage()) if inner.layout == torch.strided else None
            if unmeasured:
                storage.writers.append(TensorWrite(index, ALWAYS_FINITE))
                continue
            slot = self.tape.ranges.add(inner)
            storage.writers.append(TensorWrite(index, slot))
            storage.measured[_view_of(inner)] = len(storage.writers), slot
            slots.append(slot)
        return tuple(slots)

    def _place(self, op: RecordedOp) -> None:
        """Set the line, the module and the phase of an operation that has just run."""
        line, node = current_line(), torch._C._current_autograd_node()
        op.site = site_of(line.own, line.library)
        if node is None or (line.own is not None and is_recomputed()):
            op.module, op.module_class = self._paths.here()
            op.phase = "optimizer" if line.in_optimizer else "forward"
        else:
            op.phase, op.live = "backward", line.own is not None
            forward = self._forward_of(node)
            if not op.live:
                op.site = CallSite() if forward is None else forward.site
            if forward is not None:
                op.forward, op.module, op.module_class = forward.index, forward.module, forward.module_class
        # Its own autograd node is the one that was numbered last; a backward pass creates nodes for second derivatives.
        number, thread = torch._C._autograd._get_sequence_nr() - 1, threading.get_ident()
        if number >= 0 and self._threads.get(thread) != number:
            self._threads[thread] = number
            self._by_sequence.setdefault(number, []).append(op.index)

    def _forward_of(self, node: Any) -> RecordedOp | None:
        number = node._sequence_nr()
        if node.name().endswith("CopySlices"):  # wraps an in-place operation on a view, and is numbered after its node
            number = max((each for each in self._by_sequence if each < number), default=number)
        found = self._by_sequence.get(number, []) if number < NO_SEQUENCE else []
        ops = [self.tape.ops[index] for index in reversed(found) if index < len(self.tape.ops)]
        if len(ops) > 1 and not isinstance(node, BackwardCFunction):
            # Each thread numbers its nodes separately, and a recomputed operation may reuse another one's number.
            name = _plain(node.name().split("Backward")[0])
            ops = [op for op in ops if _plain(base_name(op.name)) == name] or ops
        return ops[0] if ops else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _view_of(tensor: Tensor) -> object:
    """Return a key for the part of the storage that a tensor covers; views of the whole storage share a key."""
    if tensor.layout != torch.strided:
        return id(tensor)
    if tensor.nbytes == tensor.untyped_storage().nbytes() and 0 not in tensor.stride():
        return tensor.dtype
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
