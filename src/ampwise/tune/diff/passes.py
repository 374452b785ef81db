"""Process the tensors of a pass: keep those of the first side, compare those of the second with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.trace.recorder import storage_id
from ampwise.tune.diff.module_calls import RETURNED, ModuleCall, ModuleCalls, TensorPlace, is_backward, traits_of
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.statistics import Factors
from ampwise.tune.diff.tensor_store import (
    BatchRows,
    MemoryBudget,
    SlotComparison,
    TensorStore,
    comparable_values,
    view_identity,
)
from ampwise.tune.diff.token_difference import TokenComparison, find_scores


class TensorEvent(NamedTuple):
    """A tensor that a module receives or returns; ``ops`` counts the operations so far of the code that made it."""

    call: ModuleCall
    role: str
    path: str
    slot: int
    is_new: bool  # seen for the first time
    ops: int


@dataclass(slots=True)
class PassOutline:
    """What the first side did: its calls, and its tensors, each with a slot."""

    calls: list[ModuleCall] = field(default_factory=list)
    events: list[TensorEvent] = field(default_factory=list)
    places: dict[TensorPlace, int] = field(default_factory=dict)
    slots: int = 0
    kinked: bool = False  # whether it has functions with a discontinuous derivative

    def add(self, call: ModuleCall, role: str, path: str, slot: int | None) -> int:
        """Add a tensor at a place; ``slot`` is None for a new tensor."""
        is_new = slot is None
        if slot is None:
            slot, self.slots = self.slots, self.slots + 1
        self.places[call.place(role, path)] = slot
        self.events.append(TensorEvent(call, role, path, slot, is_new, call.maker(role).ops))
        return slot


class RecordForward(ModuleCalls):
    """Records the first side's forward pass."""

    def __init__(self, names: ModuleNames, outline: PassOutline, kept: TensorStore, tokens: TokenComparison) -> None:
        super().__init__(names, kept)
        self._store, self._outline, self._tokens = kept, outline, tokens
        self._known: dict[int, dict[object, int]] = {}  # slots of tensors, by storage and view
        self._storages: dict[int, StorageWeakRef] = {}  # weak references that keep the address from being reused
        outline.calls = self.calls

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        values = comparable_values(tensor)
        if values is None:
            return
        storage, identity = storage_id(values), view_identity(values)
        slot = self._known.get(storage, {}).get(identity)
        number = self._outline.add(call, role, path, slot)
        if slot is None:
            self._store.put(number, values)
            self._known.setdefault(storage, {})[identity] = number
            self._storages.setdefault(storage, StorageWeakRef(values.untyped_storage()))

    def begins(self, func: Any, args: Any) -> Any:
        self._outline.kinked |= traits_of(func).is_kinked
        super().begins(func, args)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        if not is_backward() and (scores := find_scores(traits_of(func).name, args)) is not None:
            self._tokens.keep(scores)

    def before_write(self, tensor: Tensor) -> None:
        super().before_write(tensor)
        self._known.pop(storage_id(tensor), None)


class CompareForward(ModuleCalls):
    """Compares another forward pass with the kept tensors."""

    def __init__(
        self, names: ModuleNames, outline: PassOutline, kept: TensorStore, tokens: TokenComparison, *, last: bool
    ) -> None:
        super().__init__(names, kept)
        self._outline, self._tokens = outline, tokens
        tokens.begin()
        self.comparison = SlotComparison(kept, last=last)
        self.only_here: dict[TensorPlace, ModuleCall] = {}  # calls that the first side did not make

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        values, place = comparable_values(tensor), call.place(role, path)
        slot = self._outline.places.get(place)
        if slot is None and values is not None:
            self.only_here[place] = call
        self.comparison.compare(slot, values, rows=self.rows)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        if not is_backward() and (scores := find_scores(traits_of(func).name, args)) is not None:
            self._tokens.compare(scores)


class _Gradients(ModuleCalls):
    """Collects gradients of what modules return, as they arrive."""

    def __init__(self, names: ModuleNames, outline: PassOutline, kept: TensorStore) -> None:
        super().__init__(names, kept)
        self._outline = outline
        self._hooked: set[int] = set()
        self._without: dict[str, list[int]] = {}  # calls in checkpoints that first run without gradients

    def begin_rows(self, rows: BatchRows) -> None:
        super().begin_rows(rows)
        self._hooked, self._without = set(), {}

    def arrived(self, slot: int, gradient: Tensor) -> None:
        raise NotImplementedError

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        if role == RETURNED and call.module is not None:
            if tensor.requires_grad:
                self._hook_gradient(call.place(role, path), tensor)
            elif not path:
                self._without.setdefault(call.name, []).append(call.number)

    def computed_again(self, module: Module, output: Any) -> None:
        pending = self._without.get(self.names.of(module)) if module in self.names else None
        if pending and isinstance(output, Tensor) and output.requires_grad:
            # Checkpointed parts are recomputed from last to first.
            self._hook_gradient(TensorPlace(self.names.of(module), pending.pop(), RETURNED, ""), output)

    def _hook_gradient(self, place: TensorPlace, tensor: Tensor) -> None:
        slot = self._outline.places.get(place)
        if slot is None or slot in self._hooked:
            return
        self._hooked.add(slot)
        self._handles.callback(tensor.register_hook(partial(self._on_gradient, slot)).remove)

    def _on_gradient(self, slot: int, gradient: Tensor) -> None:
        with _disable_current_modes(), torch.no_grad():
            values = comparable_values(gradient)
            if values is not None:
                self.arrived(slot, values)


class RecordGradients(_Gradients):
    """Records the first side's gradients. ``only``: wanted slots; None: all, deferring those without memory."""

    def __init__(
        self,
        names: ModuleNames,
        outline: PassOutline,
        kept: TensorStore,
        budget: MemoryBudget,
        only: Collection[int] | None = None,
    ) -> None:
        super().__init__(names, outline, kept)
        self.store, self._budget, self._only = kept, budget, only
        self.order: list[int] = []  # in which they arrive
        self.deferred: set[int] = set()  # slots

    def arrived(self, slot: int, gradient: Tensor) -> None:
        if slot in self.store or slot in self.deferred or (self._only is not None and slot not in self._only):
            return
        self.order.append(slot)
        if self._only is None and not self.store.fits(gradient):
            self.deferred.add(slot)
        else:
            self.store.put(slot, gradient)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        self._budget.made(result, self.store.on_device)


class CompareGradients(_Gradients):
    """Compares the second side's gradients. ``factors`` undo the loss scales."""

    def __init__(self, names: ModuleNames, outline: PassOutline, kept: TensorStore, factors: Factors) -> None:
        super().__init__(names, outline, kept)
        self._factors, self.comparison = factors, SlotComparison(kept)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        self.comparison.compare(slot, gradient, self._factors, self.rows)
