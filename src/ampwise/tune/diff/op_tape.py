"""Compare operation by operation: the result on one side with that of the same operation on the other.

An operation is identified by its module, its name, and its position among those of that name; a backward operation by
the module whose derivative it computes. Casts are not compared, as often only one side has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.finding.call_site import CallSite
from ampwise.numbers.op_families import base_name, family_of
from ampwise.trace.recorder import storage_id, tensors_in
from ampwise.trace.stack_lines import current_line, site_of
from ampwise.tune.diff.expected_errors import PassComparisons
from ampwise.tune.diff.module_calls import ModuleCall, ModuleCalls, TensorPlace, is_backward
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.statistics import UNSCALED, Factors, Ledger
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, OpRow
from ampwise.tune.diff.tensor_difference import ComparedTensor
from ampwise.tune.diff.tensor_store import TensorStore, comparable_values

__all__ = ["CompareOps", "OpFilter", "OpKey", "OpTape", "RecordOps"]

ATTENTION = "scaled_dot_product"  # kernels of many names for one operation
CONSTANTS = frozenset(
    {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full", "arange"}
    | {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "scalar_tensor", "zero"}
)
ROUNDINGS = 4  # per operation: of its operands, of its result, its own


class OpKey(NamedTuple):
    """Identity of an operation, the same on both sides."""

    module: str
    number: int  # which call of the module
    phase: str
    name: str
    which: int  # position among operations of that name


OpFilter = Callable[[str, int, str], bool]  # by module, call number, and phase


@dataclass(slots=True)
class _RecordedOp:
    """An operation of the first side."""

    key: OpKey
    op: str
    site: CallSite
    sources: list[int] = field(default_factory=list)
    slot: int | None = None


@dataclass(slots=True)
class OpTape:
    """Operations of the first side, in order."""

    ops: list[_RecordedOp] = field(default_factory=list)
    slots: dict[tuple[OpKey, int], int] = field(default_factory=dict)  # by operation and operand; -1 is the result

    made_at: dict[TensorPlace, int] = field(default_factory=dict)  # slots of tensors that modules receive and return

    def new_slot(self, key: OpKey, operand: int) -> int:
        return self.slots.setdefault((key, operand), len(self.slots))

    def leading_to(self, place: TensorPlace) -> set[int] | None:
        """Return the slots that the tensor at a place was computed from, with its own; None if unknown."""
        sources = {seen.slot: seen.sources for seen in self.ops}
        pending, found = [self.made_at[place]] if place in self.made_at else [], set[int]()
        while pending:
            slot = pending.pop()
            if slot not in found:
                found.add(slot)
                pending += sources.get(slot, ())
        return found or None

    def rows(self, numbers: PassComparisons, slots: Collection[int] | None = None) -> Iterator[OpRow]:
        """Yield the operations that both sides ran; ``slots`` limits the results."""
        for seen in self.ops:
            if seen.slot is None or (slots is not None and seen.slot not in slots):
                continue
            given = max((numbers.error(slot) for slot in seen.sources), default=0.0)
            compared = numbers.compared(seen.slot, "", given, ROUNDINGS)
            if compared is not None:
                key = seen.key
                yield OpRow(
                    op=seen.op,
                    module=key.module,
                    call=key.number,
                    phase=key.phase,
                    compared=compared,
                    site=seen.site,
                    shrinks=_shrinks(numbers, seen, compared),
                )


def _shrinks(numbers: PassComparisons, seen: _RecordedOp, compared: ComparedTensor) -> float | None:
    rms = max((numbers.rms(slot) for slot in seen.sources), default=0.0)
    made = compared.measured.rms if compared.measured is not None else 0.0
    return rms / made if rms and made else None


class _Ops(ModuleCalls):
    """Identifies operations."""

    def __init__(self, names: ModuleNames, wanted: OpFilter) -> None:
        self._wanted = wanted
        self._by_sequence: dict[int, ModuleCall] = {}  # by the sequence number of the operation's backward node
        self._counts_back: Counter[tuple[int, str]] = Counter()
        super().__init__(names)

    def key_of(self, func: Any) -> OpKey | None:
        """Return the identity of an operation; None if it is not wanted."""
        name = base_name(str(func))
        if _is_cast(func) or _is_constant(func):
            return None
        name = ATTENTION if name.startswith(ATTENTION) else name
        if not is_backward():
            call = self.here
            which = call.keys[name]
            call.keys[name] += 1
            return self._checked(call, FORWARD, name, which)
        node = torch._C._current_autograd_node()
        found = self._by_sequence.get(node._sequence_nr())
        if found is None or torch.is_grad_enabled():
            return None
        name = f"{node.name()}: {name}"
        which = self._counts_back[found.index, name]
        self._counts_back[found.index, name] += 1
        return self._checked(found, BACKWARD, name, which)

    def _checked(self, call: ModuleCall, phase: str, name: str, which: int) -> OpKey | None:
        if not self._wanted(call.name, call.number, phase):
            return None
        return OpKey(call.name, call.number, phase, name, which)

    def note_node(self) -> None:
        """Assign the graph node numbered last to the current call, after an operation has run."""
        if not is_backward():
            self._by_sequence[torch._C._autograd._get_sequence_nr() - 1] = self.here


class RecordOps(_Ops):
    """Records the first side's operations."""

    def __init__(self, names: ModuleNames, wanted: OpFilter, shelf: TensorStore) -> None:
        self._shelf = shelf
        self.tape = OpTape()
        self._made: dict[int, int | None] = {}  # slots by the storage that an operation made; None: not kept
        super().__init__(names, wanted)

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        slot = self._made.get(storage_id(tensor))
        if slot is not None:
            self.tape.made_at.setdefault(call.place(role, path), slot)

    def begins(self, func: Any, args: Any) -> Any:
        key = self.key_of(func)
        if key is None:
            return None
        line = current_line()
        seen = _RecordedOp(key, str(func), site_of(line.own, line.library))
        with _disable_current_modes(), torch.no_grad():
            for operand, tensor in enumerate(tensors_in(args)):
                slot = self._source(key, operand, tensor)
                if slot is not None:
                    seen.sources.append(slot)
        return seen

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        self.note_node()
        made = next(_results(result), None)
        if made is None:
            return
        storage = storage_id(made)
        if begun is None:
            self._note_skipped(func, storage, args)
            return
        with _disable_current_modes(), torch.no_grad():
            values = comparable_values(made)
            if values is not None:
                begun.slot = self._made[storage] = self.tape.new_slot(begun.key, -1)
                self._shelf.put(begun.slot, values)
                self.tape.ops.append(begun)

    def _note_skipped(self, func: Any, storage: int, args: Any) -> None:
        """Track a skipped operation: a cast keeps its input's slot, a constant needs none, others are unknown."""
        given = next((storage_id(each) for each in tensors_in(args)), None)
        if _is_cast(func) and given in self._made:
            self._made[storage] = self._made[given]
        elif _is_cast(func) or _is_constant(func):
            self._made.pop(storage, None)  # the memory may have belonged to another tensor
        else:
            self._made[storage] = None

    def _source(self, key: OpKey, operand: int, tensor: Tensor) -> int | None:
        """Return the slot of an operand; None for weights and values from outside."""
        storage = storage_id(tensor)
        if storage not in self._made:
            return None
        slot = self._made[storage]
        values = comparable_values(tensor) if slot is None else None
        if values is not None:
            slot = self._made[storage] = self.tape.new_slot(key, operand)
            self._shelf.put(slot, values)
        return slot

    def before_write(self, tensor: Tensor) -> None:
        self._shelf.before_write(tensor)


class CompareOps(_Ops):
    """Compares the second side's operations."""

    def __init__(
        self, names: ModuleNames, wanted: OpFilter, tape: OpTape, shelf: TensorStore, factors: Factors
    ) -> None:
        self._tape, self._shelf, self._factors = tape, shelf, factors
        self.ledger = Ledger()
        super().__init__(names, wanted)

    def begins(self, func: Any, args: Any) -> Any:
        key = self.key_of(func)
        if key is not None:
            for operand, tensor in enumerate(tensors_in(args)):
                self._compare(key, operand, tensor)
        return key

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        self.note_node()
        made = next(_results(result), None)
        if begun is not None and made is not None:
            self._compare(begun, -1, made)

    def _compare(self, key: OpKey, operand: int, tensor: Tensor) -> None:
        slot = self._tape.slots.get((key, operand))
        if slot is None or slot in self.ledger or slot not in self._shelf:
            return
        with _disable_current_modes(), torch.no_grad():
            values, kept = comparable_values(tensor), self._shelf[slot]
            if values is not None and values.shape == kept.shape:
                self.ledger.add(slot, kept, values, self._factors if key.phase == BACKWARD else UNSCALED)
            self._shelf.drop(slot)

    def before_write(self, tensor: Tensor) -> None:
        self._shelf.before_write(tensor)


@lru_cache(maxsize=8192)
def _is_cast(func: Any) -> bool:
    return family_of(str(func)) == "cast"


@lru_cache(maxsize=8192)
def _is_constant(func: Any) -> bool:
    return base_name(str(func)) in CONSTANTS


def _results(result: Any) -> Iterator[Tensor]:
    return tensors_in(result if isinstance(result, list | tuple) else (result,))
