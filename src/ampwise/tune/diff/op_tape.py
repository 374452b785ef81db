"""Compare operation by operation: the result on one side with that of the same operation on the other.

An operation is identified by its module, its name, and its position among those of that name; a backward operation by
the module whose derivative it computes. Casts are not compared, as often only one side has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import current_line, site_of
from ampwise.trace.recorder import storage_id, tensors_in
from ampwise.tune.diff.expected_errors import PassComparisons
from ampwise.tune.diff.module_calls import ModuleCall, ModuleCalls, TensorPlace, is_backward, traits_of
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.statistics import UNSCALED, Factors
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, OpRow
from ampwise.tune.diff.tensor_store import SlotComparison, TensorStore, comparable_values, results_in

ATTENTION = "scaled_dot_product"  # kernels of many names for one operation
ROUNDINGS = 4  # per operation: of its operands, of its result, its own

OpFilter = Callable[[str, int, str], bool]  # by module, call number, and phase


class OpKey(NamedTuple):
    """Identity of an operation, the same on both sides."""

    module: str
    number: int  # which call of the module
    phase: str
    name: str
    which: int  # position among operations of that name


@dataclass(slots=True)
class _RecordedOp:
    """An operation of the first side."""

    key: OpKey
    op: str
    site: CallSite
    sources: list[int] = field(default_factory=list)
    slot: int = -1


@dataclass(slots=True)
class OpTape:
    """Operations of the first side, in order."""

    ops: list[_RecordedOp] = field(default_factory=list)
    slots: dict[tuple[OpKey, int], int] = field(default_factory=dict)  # by operation and operand; -1 is the result
    made_at: dict[TensorPlace, int] = field(default_factory=dict)  # slots of tensors that modules receive and return
    numbers: PassComparisons = field(default_factory=lambda: PassComparisons(measured={}))

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

    def rows(self, slots: Collection[int] | None = None) -> Iterator[OpRow]:
        """Yield the operations that both sides ran; ``slots`` limits the results."""
        numbers = self.numbers
        for seen in self.ops:
            if slots is not None and seen.slot not in slots:
                continue
            given = max((numbers.error(slot) for slot in seen.sources), default=0.0)
            compared = numbers.compared(seen.slot, "", given, ROUNDINGS)
            if compared is None:
                continue
            rms, made = max((numbers.rms(slot) for slot in seen.sources), default=0.0), numbers.rms(seen.slot)
            yield OpRow(
                op=seen.op,
                module=seen.key.module,
                call=seen.key.number,
                phase=seen.key.phase,
                compared=compared,
                site=seen.site,
                shrinks=rms / made if rms and made else None,
            )


class _Ops(ModuleCalls):
    """Identifies operations."""

    def __init__(self, names: ModuleNames, wanted: OpFilter, kept: TensorStore) -> None:
        super().__init__(names, kept)
        self._wanted = wanted
        self._by_sequence: dict[int, ModuleCall] = {}  # by the sequence number of the operation's backward node
        self._counts_back: Counter[tuple[int, str]] = Counter()

    def key_of(self, func: Any) -> OpKey | None:
        """Return the identity of an operation; None if it is not wanted."""
        traits = traits_of(func)
        if traits.is_cast or traits.is_constant:
            return None
        name = ATTENTION if traits.name.startswith(ATTENTION) else traits.name
        if not is_backward():
            call, phase, which = self.here, FORWARD, self.here.keys[name]
            call.keys[name] += 1
        else:
            node = torch._C._current_autograd_node()
            found = self._by_sequence.get(node._sequence_nr())
            if found is None or torch.is_grad_enabled():
                return None
            call, phase, name = found, BACKWARD, f"{node.name()}: {name}"
            which = self._counts_back[call.index, name]
            self._counts_back[call.index, name] += 1
        if not self._wanted(call.name, call.number, phase):
            return None
        return OpKey(call.name, call.number, phase, name, which)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        if not is_backward():  # the graph node numbered last belongs to the current call
            self._by_sequence[torch._C._autograd._get_sequence_nr() - 1] = self.here
        made = next(iter(results_in(result)), None)
        if made is not None:
            with _disable_current_modes(), torch.no_grad():
                self.ended(begun, func, args, made)

    def ended(self, begun: Any, func: Any, args: Any, made: Tensor) -> None:
        raise NotImplementedError


class RecordOps(_Ops):
    """Records the first side's operations."""

    def __init__(self, names: ModuleNames, wanted: OpFilter, kept: TensorStore) -> None:
        super().__init__(names, wanted, kept)
        self._store, self.tape = kept, OpTape()
        self._made: dict[int, int | None] = {}  # slots by the storage that an operation made; None: not kept

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
                storage = storage_id(tensor)
                if storage not in self._made:  # weights, and values from outside
                    continue
                slot = self._made[storage]
                values = comparable_values(tensor) if slot is None else None
                if values is not None:
                    slot = self._made[storage] = self.tape.new_slot(key, operand)
                    self._store.put(slot, values)
                if slot is not None:
                    seen.sources.append(slot)
        return seen

    def ended(self, begun: Any, func: Any, args: Any, made: Tensor) -> None:
        storage, traits = storage_id(made), traits_of(func)
        if begun is not None:
            values = comparable_values(made)
            if values is not None:
                begun.slot = self._made[storage] = self.tape.new_slot(begun.key, -1)
                self._store.put(begun.slot, values)
                self.tape.ops.append(begun)
            return
        # A skipped operation: a cast keeps its input's slot, a constant needs none, others are unknown.
        given = next((storage_id(each) for each in tensors_in(args)), None)
        if traits.is_cast and given in self._made:
            self._made[storage] = self._made[given]
        elif traits.is_cast or traits.is_constant:
            self._made.pop(storage, None)  # the memory may have belonged to another tensor
        else:
            self._made[storage] = None


class CompareOps(_Ops):
    """Compares the second side's operations. ``factors`` undo the loss scales."""

    def __init__(self, names: ModuleNames, wanted: OpFilter, tape: OpTape, kept: TensorStore, factors: Factors) -> None:
        super().__init__(names, wanted, kept)
        self._tape, self._factors, self.comparison = tape, factors, SlotComparison(kept)

    def begins(self, func: Any, args: Any) -> Any:
        key = self.key_of(func)
        if key is not None:
            with _disable_current_modes(), torch.no_grad():
                for operand, tensor in enumerate(tensors_in(args)):
                    self._compare(key, operand, tensor)
        return key

    def ended(self, begun: Any, func: Any, args: Any, made: Tensor) -> None:
        if begun is not None:
            self._compare(begun, -1, made)

    def _compare(self, key: OpKey, operand: int, tensor: Tensor) -> None:
        slot = self._tape.slots.get((key, operand))
        if slot is not None:
            factors = self._factors if key.phase == BACKWARD else UNSCALED
            self.comparison.compare(slot, comparable_values(tensor), factors)
