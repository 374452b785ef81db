"""Operation by operation: what each made on one side, held against what the same one made on the other.

An operation is known by the module that it runs in, its name, and which of that name it is there; one of a backward
pass by the module whose derivative it belongs to. Casts are none: one side has them, and the other has not.
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

from ampwise.evidence.compared import Compared
from ampwise.evidence.conduct import Site
from ampwise.evidence.difference import BACKWARD, FORWARD, OpRow
from ampwise.evidence.op_families import base_name, family_of
from ampwise.trace.recorder import storage_id, tensors_in
from ampwise.trace.where import line_here, site_of
from ampwise.tune.diff.calls import Call, Calls, Place, is_backward
from ampwise.tune.diff.expecting import Numbers
from ampwise.tune.diff.names import Names
from ampwise.tune.diff.shelf import Shelf, legible
from ampwise.tune.diff.statistics import AS_THEY_ARE, Factors, Ledger

__all__ = ["ComparingOps", "KeepingOps", "OpKey", "Tape", "Wanted"]

ATTENTION = "scaled_dot_product"  # kernels of many names, for one operation
CONSTANTS = frozenset(
    {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full", "arange"}
    | {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "scalar_tensor", "zero"}
)
ROUNDINGS = 4  # of an operation: its operands', its result's, its own


class OpKey(NamedTuple):
    """The same operation on both sides."""

    module: str
    number: int  # of the module's call
    phase: str
    name: str
    which: int  # of that name


Wanted = Callable[[str, int, str], bool]  # by module, number of its call, and phase


@dataclass(slots=True)
class _Seen:
    """An operation of the first side."""

    key: OpKey
    op: str
    site: Site
    sources: list[int] = field(default_factory=list)
    slot: int | None = None


@dataclass(slots=True)
class Tape:
    """Operations of the first side, in their order."""

    ops: list[_Seen] = field(default_factory=list)
    slots: dict[tuple[OpKey, int], int] = field(default_factory=dict)  # by operation and operand; -1 is its result

    made_at: dict[Place, int] = field(default_factory=dict)  # slots of what modules are given and return

    def new_slot(self, key: OpKey, operand: int) -> int:
        return self.slots.setdefault((key, operand), len(self.slots))

    def leading_to(self, place: Place) -> set[int] | None:
        """The slots of what the tensor at a place was made of, and its own; None where that is not known."""
        sources = {seen.slot: seen.sources for seen in self.ops}
        waiting, found = [self.made_at[place]] if place in self.made_at else [], set[int]()
        while waiting:
            slot = waiting.pop()
            if slot not in found:
                found.add(slot)
                waiting += sources.get(slot, ())
        return found or None

    def rows(self, numbers: Numbers, slots: Collection[int] | None = None) -> Iterator[OpRow]:
        """Those that the other side has run, too; slots: of results that are wanted."""
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


def _shrinks(numbers: Numbers, seen: _Seen, compared: Compared) -> float | None:
    rms = max((numbers.rms(slot) for slot in seen.sources), default=0.0)
    made = compared.measured.rms if compared.measured is not None else 0.0
    return rms / made if rms and made else None


class _Ops(Calls):
    """Finds out which operation it is."""

    def __init__(self, names: Names, wanted: Wanted) -> None:
        self._wanted = wanted
        self._by_sequence: dict[int, Call] = {}  # by the number of the node that runs an operation backward
        self._counts_back: Counter[tuple[int, str]] = Counter()
        super().__init__(names)

    def key_of(self, func: Any) -> OpKey | None:
        """None of one that is not wanted."""
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

    def _checked(self, call: Call, phase: str, name: str, which: int) -> OpKey | None:
        if not self._wanted(call.name, call.number, phase):
            return None
        return OpKey(call.name, call.number, phase, name, which)

    def note_node(self) -> None:
        """The operation has run: the node that was numbered last is its own."""
        if not is_backward():
            self._by_sequence[torch._C._autograd._get_sequence_nr() - 1] = self.here


class KeepingOps(_Ops):
    """The first side."""

    def __init__(self, names: Names, wanted: Wanted, shelf: Shelf) -> None:
        self._shelf = shelf
        self.tape = Tape()
        self._made: dict[int, int | None] = {}  # slots, by the storage that an operation has made; None: not kept
        super().__init__(names, wanted)

    def met(self, call: Call, role: str, path: str, tensor: Tensor) -> None:
        slot = self._made.get(storage_id(tensor))
        if slot is not None:
            self.tape.made_at.setdefault(call.place(role, path), slot)

    def begins(self, func: Any, args: Any) -> Any:
        key = self.key_of(func)
        if key is None:
            return None
        line = line_here()
        seen = _Seen(key, str(func), site_of(line.own, line.library))
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
            self._pass_over(func, storage, args)
            return
        with _disable_current_modes(), torch.no_grad():
            values = legible(made)
            if values is not None:
                begun.slot = self._made[storage] = self.tape.new_slot(begun.key, -1)
                self._shelf.put(begun.slot, values)
                self.tape.ops.append(begun)

    def _pass_over(self, func: Any, storage: int, args: Any) -> None:
        """A cast hands on what it was given, a constant is the same on both sides; of others nothing is known."""
        given = next((storage_id(each) for each in tensors_in(args)), None)
        if _is_cast(func) and given in self._made:
            self._made[storage] = self._made[given]
        elif _is_cast(func) or _is_constant(func):
            self._made.pop(storage, None)  # whose memory it may have been before
        else:
            self._made[storage] = None

    def _source(self, key: OpKey, operand: int, tensor: Tensor) -> int | None:
        """The slot of an operand; of a weight, or what came from outside, there is none."""
        storage = storage_id(tensor)
        if storage not in self._made:
            return None
        slot = self._made[storage]
        values = legible(tensor) if slot is None else None
        if values is not None:
            slot = self._made[storage] = self.tape.new_slot(key, operand)
            self._shelf.put(slot, values)
        return slot

    def before_write(self, tensor: Tensor) -> None:
        self._shelf.before_write(tensor)


class ComparingOps(_Ops):
    """The other side."""

    def __init__(self, names: Names, wanted: Wanted, tape: Tape, shelf: Shelf, factors: Factors) -> None:
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
            values, kept = legible(tensor), self._shelf[slot]
            if values is not None and values.shape == kept.shape:
                self.ledger.add(slot, kept, values, self._factors if key.phase == BACKWARD else AS_THEY_ARE)
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
