"""Record every operation that torch runs, forward and backward, on a tape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.numbers.op_families import base_name, is_collective
from ampwise.trace.module_paths import ModulePaths
from ampwise.trace.stack_lines import current_line, is_recomputed, site_of
from ampwise.trace.tape import RecordedOp, RecordedStorage, Tape, TensorRead, TensorWrite
from ampwise.trace.undo import UndoLog, written_arguments
from ampwise.trace.value_ranges import ALWAYS_FINITE, local_shard

__all__ = ["InspectMode", "LeafGradient", "OpRecorder", "UndoMode", "dtype_name", "storage_id", "tensors_in"]

# Operations that return a view of their input although their schema does not say so.
UNDECLARED_VIEWS = ("aten._unsafe_view.", "aten._reshape_alias.", "aten.lift_fresh.", "aten.alias.")
NO_SEQUENCE = 2**63  # from here on, the sequence number of autograd nodes that belong to no operation
InspectFunction = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """Facts about an operation from its schema."""

    name: str
    writes: tuple[tuple[int, str], ...]
    is_view: bool
    draws: bool  # random numbers, maybe from the user's own generator
    is_filled_later: bool  # its result has no values yet: scratch memory, or a collective's output


@lru_cache(maxsize=8192)
def _op_facts(func: Any) -> _OpFacts:
    name, returns = str(func), func._schema.returns
    aliased = [each.alias_info for each in returns]
    is_view = bool(returns) and all(info is not None and not info.is_write for info in aliased)
    is_view |= name.startswith(UNDECLARED_VIEWS)
    draws = any("Generator" in str(argument.type) for argument in func._schema.arguments)
    return _OpFacts(name, written_arguments(func), is_view, draws, is_collective(name) or "empty" in base_name(name))


def tensors_in(things: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    for each in things:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (inner for inner in each if isinstance(inner, Tensor))


DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ampwise's name of a dtype: "fp16"; torch's name for one that is no floating-point format: "int64"."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.").replace("float8", "fp8").removesuffix("fn")


class LeafGradient(NamedTuple):
    """A leaf tensor that requires gradients, and the gradient it had."""

    tensor: Tensor
    gradient: Tensor | None


class UndoMode(TorchDispatchMode):
    """Dispatch mode that saves what a replay overwrites, so that it can be restored; records nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.undo = UndoLog()
        self.leaves: dict[int, LeafGradient] = {}  # leaf tensors that were read, by id
        self._made: set[int] = set()  # storages that the replay allocated
        self._generators: dict[torch.Generator, Tensor] = {}  # the user's own generators, and their states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _op_facts(func)
        if facts.is_view:
            return func(*args, **kwargs)
        for tensor in tensors_in(args):
            self.note_leaf(tensor)
        if facts.draws:
            self.note_generators(kwargs)
        if not facts.writes:
            result = self.run(func, args, kwargs)
            self._made.update(map(storage_id, _results(result)))
            return result
        written = list(_written(facts, args, kwargs))
        for tensor in written:
            if storage_id(tensor) not in self._made:
                self.undo.before_write(tensor)
        result = self.run(func, args, kwargs)
        # A batch norm writes to its statistics and returns a new tensor; other operations return what they wrote to.
        self._made.update(set(map(storage_id, _results(result))) - set(map(storage_id, written)))
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

    def put_back(self) -> None:
        """Restore all memory that was written to, the gradients of leaf tensors, and generators."""
        self.undo.put_back()
        for leaf in self.leaves.values():
            leaf.tensor.grad = leaf.gradient
        for generator, state in self._generators.items():
            generator.set_state(state)


class InspectMode(UndoMode):
    """Dispatch mode that inspects some operations, given by their index and name."""

    def __init__(self, wanted: Mapping[int, str], look: InspectFunction) -> None:
        super().__init__()
        self._wanted, self._look = wanted, look
        self._count = -1

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._count += 1
        name = self._wanted.get(self._count)
        if name is None or name != str(func):
            return func(*args, **kwargs)
        return self._look(self._count, func, args, kwargs)


class OpRecorder(UndoMode):
    """Dispatch mode that records all operations on a tape."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.tape = Tape()
        self._paths = paths
        self._storages: dict[int, RecordedStorage] = {}
        self._by_sequence: dict[
            int, list[int]
        ] = {}  # forward operations, by the sequence number of their autograd node
        self._threads: dict[int, int] = {}  # the last sequence number, by thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _op_facts(func)
        if facts.is_view:  # its storage is known already
            return func(*args, **kwargs)
        given = tuple(self.given(tensor) for tensor in tensors_in((*args, *kwargs.values())))
        written = list(_written(facts, args, kwargs))
        for tensor in written:
            if self._storages[storage_id(tensor)].leaf is not None:
                self.undo.before_write(tensor)
        if facts.draws:
            self.note_generators(kwargs)
        index = len(self.tape.ops)
        result = func(*args, **kwargs)
        slots = self._record_results(index, given, written, result, unmeasured=facts.is_filled_later)
        self.tape.ops.append(self._op(index, facts.name, args, kwargs, given, slots, result))
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
        self, index: int, given: tuple[TensorRead, ...], written: list[Tensor], result: Any, *, unmeasured: bool
    ) -> tuple[int, ...]:
        """Record what the operation wrote, and return the slots of its results."""
        taken = {id(each.storage) for each in given}
        slots = []
        seen: set[int] = set()
        for tensor in (*_results(result), *written):
            inner = local_shard(tensor)
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            storage = self._storages.get(storage_id(inner))
            is_written = any(inner is local_shard(each) for each in written)
            if storage is not None and id(storage) in taken and not is_written:
                continue  # a view of an input, although the schema does not say so
            if storage is None or not is_written:
                storage = self._storages[storage_id(inner)] = RecordedStorage(address=_address(inner))
            if unmeasured:
                storage.writers.append(TensorWrite(index, ALWAYS_FINITE))
                continue
            slot = self.tape.ranges.add(inner)
            storage.writers.append(TensorWrite(index, slot))
            storage.measured[_view_of(inner)] = len(storage.writers), slot
            slots.append(slot)
        return tuple(slots)

    def _op(
        self,
        index: int,
        name: str,
        args: Any,
        kwargs: Any,
        given: tuple[TensorRead, ...],
        slots: tuple[int, ...],
        result: Any,
    ) -> RecordedOp:
        line = current_line()
        op = RecordedOp(
            index=index,
            name=name,
            dtype=next((dtype_name(tensor.dtype) for tensor in (*_results(result), *tensors_in(args))), ""),
            inputs=given,
            outputs=slots,
            scalars=tuple(each for each in (*args, *kwargs.values()) if isinstance(each, float)),
            site=site_of(line.own, line.library),
        )
        node = torch._C._current_autograd_node()
        is_forward = node is None or (line.own is not None and is_recomputed())
        if is_forward:
            op.module, op.module_class = self._paths.here()
            op.phase = "optimizer" if line.in_optimizer else "forward"
        else:
            self._place_in_backward(op, node, live=line.own is not None)
        self._note_sequence(index)  # a backward pass creates nodes too, for second derivatives
        return op

    def _note_sequence(self, index: int) -> None:
        """Record the autograd node of this operation: the one that was numbered last."""
        number = torch._C._autograd._get_sequence_nr() - 1
        thread = threading.get_ident()
        if number >= 0 and self._threads.get(thread) != number:
            self._threads[thread] = number
            self._by_sequence.setdefault(number, []).append(index)

    def _place_in_backward(self, op: RecordedOp, node: Any, *, live: bool) -> None:
        op.phase, op.live = "backward", live
        if not live:
            op.site = site_of(None, None)
        forward = self._forward_of(node)
        if forward is None:
            return
        op.forward = forward.index
        op.module, op.module_class = forward.module, forward.module_class
        if not live:
            op.site = forward.site

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


def _results(result: Any) -> Iterator[Tensor]:
    return tensors_in(result if isinstance(result, list | tuple) else (result,))


def _written(facts: _OpFacts, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, name in facts.writes:
        yield from tensors_in((args[position] if position < len(args) else kwargs.get(name),))


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage."""
    inner = local_shard(tensor)
    if not _is_strided(inner):
        return id(inner)
    try:
        return int(inner.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(inner)


def _address(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference that keeps the storage's address from being reused; the memory itself may be freed."""
    try:
        return StorageWeakRef(tensor.untyped_storage()) if _is_strided(tensor) else None
    except (NotImplementedError, RuntimeError):
        return None


def _view_of(tensor: Tensor) -> object:
    """Return a key for the part of the storage that a tensor covers; views of the whole storage share a key."""
    if not _is_strided(tensor):
        return id(tensor)
    if tensor.nbytes == tensor.untyped_storage().nbytes() and 0 not in tensor.stride():
        return tensor.dtype
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
