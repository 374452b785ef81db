"""What is done with the tensors of a pass: the first side's are kept, the second's are held against them."""

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

from ampwise.emulation.products import WHOLE
from ampwise.evidence.op_families import base_name
from ampwise.trace.recorder import storage_id
from ampwise.tune.diff.calls import GIVEN, RETURNED, Call, Calls, Place
from ampwise.tune.diff.names import Names
from ampwise.tune.diff.room import Room
from ampwise.tune.diff.shelf import Shelf, identity_of, legible
from ampwise.tune.diff.statistics import Factors, Ledger

__all__ = ["Comparing", "ComparingGradients", "Event", "Keeping", "KeepingGradients", "Outline"]

# Functions whose derivative jumps: a value that rounding takes across changes it altogether.
KINKED = frozenset(
    {"relu", "leaky_relu", "prelu", "rrelu_with_noise", "threshold", "hardtanh", "hardsigmoid", "hardswish", "abs"}
    | {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "amax", "amin", "topk", "sort"}
    | {"max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "sign", "round"}
)


class Event(NamedTuple):
    """A tensor was met. Operations: of the code that made it, so far; a module's own, or of what is around it."""

    call: Call
    role: str
    path: str
    slot: int
    is_new: bool  # it was not met before
    ops: int


@dataclass(slots=True)
class Outline:
    """What the first side did: its calls, and the tensors met, each of which has a slot."""

    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    places: dict[Place, int] = field(default_factory=dict)
    slots: int = 0
    kinked: bool = False  # it has functions whose derivative jumps

    def add(self, call: Call, role: str, path: str, slot: int | None) -> int:
        """A tensor at a place; slot: None for a new one."""
        is_new = slot is None
        if slot is None:
            slot, self.slots = self.slots, self.slots + 1
        maker = call.parent if role == GIVEN and call.parent is not None else call
        self.places[call.place(role, path)] = slot
        self.events.append(Event(call, role, path, slot, is_new, maker.ops))
        return slot


class _Values(Calls):
    """A forward pass in which modules are noted whose products are inside one kernel."""

    def __init__(self, names: Names) -> None:
        self.whole_kernels: dict[str, None] = {}
        super().__init__(names)

    def begins(self, func: Any, args: Any) -> Any:
        if _is_whole(func):
            self.whole_kernels[self.here.name or self.here.kind] = None


class Keeping(_Values):
    """The first side's forward pass."""

    def __init__(self, names: Names, outline: Outline, shelf: Shelf) -> None:
        self._outline, self.shelf = outline, shelf
        self._known: dict[int, dict[object, int]] = {}  # slots of tensors, by storage and what of it they show
        self._storages: dict[int, StorageWeakRef] = {}  # which keep the address from being another's
        super().__init__(names)
        outline.calls = self.calls

    def met(self, call: Call, role: str, path: str, tensor: Tensor) -> None:
        values = legible(tensor)
        if values is None:
            return
        storage, identity = storage_id(values), identity_of(values)
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


class Comparing(_Values):
    """Another forward pass, held against what is kept. last: what was compared is then no longer needed."""

    def __init__(self, names: Names, outline: Outline, shelf: Shelf, *, last: bool) -> None:
        self._outline, self._shelf, self._last = outline, shelf, last
        self.ledger = Ledger()
        self.unlike: dict[int, str] = {}  # slots whose tensors cannot be compared
        self.only_here: dict[Place, Call] = {}  # what the first side has not called
        super().__init__(names)

    def met(self, call: Call, role: str, path: str, tensor: Tensor) -> None:
        values = legible(tensor)
        slot = self._outline.places.get(call.place(role, path))
        if slot is None and values is not None:
            self.only_here[call.place(role, path)] = call
        if slot is None or values is None or slot in self.ledger or slot in self.unlike:
            return
        kept = self._shelf[slot]
        if told := _unlike(kept, values):
            self.unlike[slot] = told
        else:
            self.ledger.add(slot, kept, values)
        if self._last:
            self._shelf.drop(slot)

    def before_write(self, tensor: Tensor) -> None:
        self._shelf.before_write(tensor)


class _Gradients(Calls):
    """The gradients by what modules return, as they arrive."""

    def __init__(self, names: Names, outline: Outline) -> None:
        self._outline = outline
        self._awaited: set[int] = set()
        self._without: dict[str, list[int]] = {}  # calls in checkpoints that run without gradients at first
        super().__init__(names)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        raise NotImplementedError

    def met(self, call: Call, role: str, path: str, tensor: Tensor) -> None:
        if role == RETURNED and call.module is not None:
            if tensor.requires_grad:
                self._await(call.place(role, path), tensor)
            elif not path:
                self._without.setdefault(call.name, []).append(call.number)

    def computed_again(self, module: Module, output: Any) -> None:
        waiting = self._without.get(self.names.of(module)) if module in self.names else None
        if waiting and isinstance(output, Tensor) and output.requires_grad:
            # Checkpointed parts are computed again from the last to the first.
            self._await(Place(self.names.of(module), waiting.pop(), RETURNED, ""), output)

    def _await(self, place: Place, tensor: Tensor) -> None:
        slot = self._outline.places.get(place)
        if slot is None or slot in self._awaited:
            return
        self._awaited.add(slot)
        handle = tensor.register_hook(partial(self._hear, slot))
        self._handles.callback(handle.remove)

    def _hear(self, slot: int, gradient: Tensor) -> None:
        with _disable_current_modes(), torch.no_grad():
            values = legible(gradient)
            if values is not None:
                self.arrived(slot, values)


class KeepingGradients(_Gradients):
    """Those of the first side. only: slots that are wanted; None: all, and what there is no room for is put off."""

    def __init__(
        self, names: Names, outline: Outline, shelf: Shelf, room: Room, only: Collection[int] | None = None
    ) -> None:
        self.shelf, self._room, self._only = shelf, room, only
        self.order: list[int] = []  # in which they arrive
        self.put_off: set[int] = set()  # slots
        super().__init__(names, outline)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        if slot in self.shelf or slot in self.put_off or (self._only is not None and slot not in self._only):
            return
        self.order.append(slot)
        if self._only is None and not self.shelf.fits(gradient):
            self.put_off.add(slot)
        else:
            self.shelf.put(slot, gradient)

    def ends(self, begun: Any, func: Any, args: Any, result: Any) -> None:
        self._room.made(result, self.shelf.on_device)

    def before_write(self, tensor: Tensor) -> None:
        self.shelf.before_write(tensor)


class ComparingGradients(_Gradients):
    """Those of the second. factors: what undoes the scales of the losses."""

    def __init__(self, names: Names, outline: Outline, shelf: Shelf, factors: Factors) -> None:
        self._shelf, self._factors = shelf, factors
        self.ledger = Ledger()
        self.unlike: dict[int, str] = {}
        super().__init__(names, outline)

    def arrived(self, slot: int, gradient: Tensor) -> None:
        if slot not in self._shelf:
            return
        kept = self._shelf[slot]
        if told := _unlike(kept, gradient):
            self.unlike[slot] = told
        else:
            self.ledger.add(slot, kept, gradient, self._factors)
        self._shelf.drop(slot)


@lru_cache(maxsize=8192)
def _is_whole(func: Any) -> bool:
    return func.overloadpacket.__name__ in WHOLE


@lru_cache(maxsize=8192)
def _has_kink(func: Any) -> bool:
    return base_name(str(func)) in KINKED


def _unlike(a: Tensor, b: Tensor) -> str:
    """Why two tensors cannot be compared."""
    if a.shape == b.shape and a.is_floating_point() == b.is_floating_point():
        return ""
    shown: Callable[[Tensor], str] = lambda each: "×".join(map(str, each.shape)) or "a number"  # noqa: E731
    if a.shape != b.shape:
        return f"{shown(a)} in a, {shown(b)} in b"
    return f"{str(a.dtype).removeprefix('torch.')} in a, {str(b.dtype).removeprefix('torch.')} in b"
