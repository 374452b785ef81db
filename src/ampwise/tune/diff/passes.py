"""Process the tensors of a pass: keep those of the first side, compare those of the second with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.numbers.emulation.emulated_matmuls import NOT_EMULATED
from ampwise.numbers.op_families import base_name
from ampwise.trace.recorder import storage_id
from ampwise.tune.diff.memory_budget import MemoryBudget
from ampwise.tune.diff.module_calls import GIVEN, RETURNED, ModuleCall, ModuleCalls, TensorPlace
from ampwise.tune.diff.names import ModuleNames
from ampwise.tune.diff.statistics import Factors, Ledger
from ampwise.tune.diff.tensor_store import TensorStore, comparable_values, view_identity

__all__ = ["CompareForward", "CompareGradients", "PassOutline", "RecordForward", "RecordGradients", "TensorEvent"]

# Functions with a discontinuous derivative: rounding across the jump changes it completely.
KINKED = frozenset(
    {"relu", "leaky_relu", "prelu", "rrelu_with_noise", "threshold", "hardtanh", "hardsigmoid", "hardswish", "abs"}
    | {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "amax", "amin", "topk", "sort"}
    | {"max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "sign", "round"}
)


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
        maker = call.parent if role == GIVEN and call.parent is not None else call
        self.places[call.place(role, path)] = slot
        self.events.append(TensorEvent(call, role, path, slot, is_new, maker.ops))
        return slot


class _Values(ModuleCalls):
    """A forward pass that notes modules whose matmuls run inside one fused kernel."""

    def __init__(self, names: ModuleNames) -> None:
        self.whole_kernels: dict[str, None] = {}
        super().__init__(names)

    def begins(self, func: Any, args: Any) -> Any:
        if _is_whole(func):
            self.whole_kernels[self.here.name or self.here.kind] = None


class RecordForward(_Values):
    """Records the first side's forward pass."""

    def __init__(self, names: ModuleNames, outline: PassOutline, shelf: TensorStore) -> None:
        self._outline, self.shelf = outline, shelf
        self._known: dict[int, dict[object, int]] = {}  # slots of tensors, by storage and view
        self._storages: dict[int, StorageWeakRef] = {}  # weak references that keep the address from being reused
        super().__init__(names)
        outline.calls = self.calls

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        values = comparable_values(tensor)
        if values is None:
            return
        storage, identity = storage_id(values), view_identity(values)
        slot = self._known.get(storage, {}).get(identity)
        number = self._outline.add(call, role, path, slot)
        if slot is None:
            self.shelf.put(number, values)
            self._known.setdefault(storage, {})[identity] = number
            self._storages.setdefault(storage, StorageWeakRef(values.untyped_storage()))

    def begins(self, func: Any, args: Any) -> Any:
        self._outline.kinked |= _has_kink(func)
        super().begins(func, args)

    def before_write(self, tensor: Tensor) -> None:
        self.shelf.before_write(tensor)
        self._known.pop(storage_id(tensor), None)


class CompareForward(_Values):
    """Compares another forward pass with the kept tensors; ``last`` drops each after its comparison."""

    def __init__(self, names: ModuleNames, outline: PassOutline, shelf: TensorStore, *, last: bool) -> None:
        self._outline, self._shelf, self._last = outline, shelf, last
        self.ledger = Ledger()
        self.unlike: dict[int, str] = {}  # slots whose tensors cannot be compared
        self.only_here: dict[TensorPlace, ModuleCall] = {}  # calls that the first side did not make
        super().__init__(names)

    def met(self, call: ModuleCall, role: str, path: str, tensor: Tensor) -> None:
        values = comparable_values(tensor)
        slot = self._outline.places.get(call.place(role, path))
        if slot is None and values is not None:
            self.only_here[call.place(role, path)] = call
        if slot is None or values is None or slot in self.ledger or slot in self.unlike:
            return
        kept = self._shelf[slot]
        if why := _unlike(kept, values):
            self.unlike[slot] = why
        else:
            self.ledger.add(slot, kept, values)
        if self._last:
            self._shelf.drop(slot)

    def before_write(self, tensor: Tensor) -> None:
        self._shelf.before_write(tensor)


class _Gradients(ModuleCalls):
    """Collects gradients of what modules return, as they arrive."""

    def __init__(self, names: ModuleNames, outline: PassOutline) -> None:
        self._outline = outline
        self._hooked: set[int] = set()
        self._without: dict[str, list[int]] = {}  # calls in checkpoints that first run without gradients
        super().__init__(names)

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
        handle = tensor.register_hook(partial(self._on_gradient, slot))
        self._handles.callback(handle.remove)

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
        shelf: TensorStore,
        budget: MemoryBudget,
        only: Collection[int] | None = None,
    ) -> None:
        self.shelf, self._budget, self._only = shelf, budget, only
        self.order: list[int] = []  # in which they arrive
        self.deferred: set[int] = set()  # slots
        super().__init__(names, outline)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        if slot in self.shelf or slot in self.deferred or (self._only is not None and slot not in self._only):
            return
        self.order.append(slot)
        if self._only is None and not self.shelf.fits(gradient):
            self.deferred.add(slot)
        else:
            self.shelf.put(slot, gradient)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        self._budget.made(result, self.shelf.on_device)

    def before_write(self, tensor: Tensor) -> None:
        self.shelf.before_write(tensor)


class CompareGradients(_Gradients):
    """Compares the second side's gradients. ``factors`` undo the loss scales."""

    def __init__(self, names: ModuleNames, outline: PassOutline, shelf: TensorStore, factors: Factors) -> None:
        self._shelf, self._factors = shelf, factors
        self.ledger = Ledger()
        self.unlike: dict[int, str] = {}
        super().__init__(names, outline)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        if slot not in self._shelf:
            return
        kept = self._shelf[slot]
        if why := _unlike(kept, gradient):
            self.unlike[slot] = why
        else:
            self.ledger.add(slot, kept, gradient, self._factors)
        self._shelf.drop(slot)


@lru_cache(maxsize=8192)
def _is_whole(func: Any) -> bool:
    return func.overloadpacket.__name__ in NOT_EMULATED


@lru_cache(maxsize=8192)
def _has_kink(func: Any) -> bool:
    return base_name(str(func)) in KINKED


def _unlike(a: Tensor, b: Tensor) -> str:
    """Return why two tensors cannot be compared; "" if they can."""
    if a.shape == b.shape and a.is_floating_point() == b.is_floating_point():
        return ""
    shown: Callable[[Tensor], str] = lambda each: "×".join(map(str, each.shape)) or "a number"  # noqa: E731
    if a.shape != b.shape:
        return f"{shown(a)} in a, {shown(b)} in b"
    return f"{str(a.dtype).removeprefix('torch.')} in a, {str(b.dtype).removeprefix('torch.')} in b"
