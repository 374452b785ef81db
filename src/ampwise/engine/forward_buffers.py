"""Buffers that a forward pass changes, of modules of any kind: averages of activations, codebooks, counters, caches.

A copy of each is kept. It holds until the buffer is written to or replaced, which torch counts; so that a buffer that
never changes is copied once. Writes to ``buffer.data`` are not counted: these buffers are found by comparing values in
the first windows. A buffer that was once seen to change is copied before every window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from ampwise.engine.conditional import Conditional, Pair, are_alike, as_numbers, room_for
from ampwise.engine.scaling.gradients import there
from ampwise.errors import BadInput

__all__ = ["ForwardBuffers", "Place"]

MOST_ON_DEVICE = 64 * 2**20  # bytes of copies of buffers that have not changed yet; the host has those beyond
COMPARED = 3  # windows


class Place(NamedTuple):
    """Where a buffer is."""

    module: Module
    name: str


@dataclass(slots=True, eq=False)
class Held:
    """A buffer as it was when it was remembered."""

    place: Place
    path: str
    tensor: Tensor | None = None  # itself: another may have taken its place
    stamp: tuple[int, ...] = ()
    copy: Tensor | None = None
    known: bool = False  # there is something to go back to, if only that there was no buffer

    @property
    def now(self) -> Tensor | None:
        return self.place.module._buffers.get(self.place.name)

    @property
    def has_changed(self) -> bool:
        now = self.now
        return not self.known or now is not self.tensor or _stamp(now) != self.stamp

    def hold(self, *, on_host: bool) -> Pair | None:
        """Take note of what is there now; where it is to be copied to, and what."""
        now = self.now
        self.known = now is None or not is_lazy(now)
        self.tensor, self.stamp = (now, _stamp(now)) if self.known else (None, ())
        if now is None or not self.known:
            self.copy = None
        elif not _is_plain(now):
            self.copy = None if now.is_inference() else now.detach().clone()  # nobody can write to the former
        else:
            if self.copy is None or not are_alike(self.copy, now, on_host=on_host):
                self.copy = room_for(now, on_host=on_host)
            return self.copy, now.detach()
        return None

    @property
    def can_be_written_back(self) -> bool:
        """The tensor that was remembered is still there, and the copy fits it."""
        now = self.now
        return now is self.tensor and self._fits(now)

    @property
    def was_replaced_by_one_alike(self) -> bool:
        now = self.now
        return now is not self.tensor and self._fits(now)

    def _fits(self, now: Tensor | None) -> bool:
        return (
            now is not None
            and self.copy is not None
            and _is_plain(now)
            and _is_plain(self.copy)
            and (now.dtype, now.shape) == (self.copy.dtype, self.copy.shape)
        )

    def reassign(self) -> None:
        """Have the tensor there that was remembered, or one with its values if it was written to since."""
        tensor = self.tensor
        if tensor is not None and self.copy is not None and _stamp(tensor) != self.stamp:
            tensor = self.copy.to(tensor.device, copy=True)
        self.place.module._buffers[self.place.name] = tensor


class ForwardBuffers:
    """All buffers of models but those ``besides``, which someone else looks after.

    alike: other ones of the same models, which learn together which buffers change.
    """

    def __init__(
        self, models: Sequence[Module], besides: Iterable[Place] = (), alike: ForwardBuffers | None = None
    ) -> None:
        self._besides = frozenset(besides)
        self._modules: dict[Module, str] = {}
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                self._modules.setdefault(module, f"{number}.{name}")
        self._dicts = [module._buffers for module in self._modules]
        self._held: dict[Place, Held] = {}
        self._count = 0  # of buffers, when they were looked for
        self._moving: set[Place] = set() if alike is None else alike._moving
        self._remembers = False
        self._compared = 0  # windows
        self._on_device = 0  # bytes of copies of buffers that have not changed yet

    # Remembering

    def remember(self) -> None:
        """As they are now. Nothing waits, but for large buffers the first time."""
        self._look_for_new()
        changed = [held for held in self._held.values() if held.place in self._moving or held.has_changed]
        _copy_all(pair for held in changed if (pair := held.hold(on_host=self._goes_to_host(held))) is not None)
        self._remembers = True

    def forget(self) -> None:
        self._remembers = False

    def _look_for_new(self) -> None:
        for place in self._came():
            self._held[place] = Held(place, f"{self._modules[place.module]}.{place.name}")
        self._count = sum(map(len, self._dicts))

    def _came(self) -> list[Place]:
        """Buffers that were not there when they were looked for."""
        if sum(map(len, self._dicts)) == self._count:
            return []
        places = (Place(module, name) for module in self._modules for name in module._buffers)
        return [place for place in places if place not in self._held and place not in self._besides]

    def _goes_to_host(self, held: Held) -> bool:
        now = held.now
        if now is None or now.device.type == "cpu" or held.place in self._moving or not _is_plain(now):
            return False
        if held.copy is not None:
            return held.copy.device.type == "cpu"
        self._on_device += now.nbytes
        return self._on_device > MOST_ON_DEVICE

    # Learning

    def learn(self) -> None:
        """A window is over: those that have changed in it will be copied before each."""
        if not self._remembers:
            return
        self._moving |= {held.place for held in self._held.values() if held.has_changed}
        if self._compared < COMPARED:
            self._compared += 1
            self._moving |= self._with_other_values()

    def _with_other_values(self) -> set[Place]:
        still = [held for held in self._held.values() if held.place not in self._moving]
        differ: dict[torch.device, list[tuple[Place, Tensor]]] = {}
        for held in still:
            now = held.now
            if held.can_be_written_back and now is not None and held.copy is not None:
                flag = (as_numbers(now) != as_numbers(held.copy.to(now.device))).any()
                differ.setdefault(now.device, []).append((held.place, flag))
        return {
            place
            for found in differ.values()
            for (place, _), flag in zip(found, torch.stack([flag for _, flag in found]).tolist(), strict=True)
            if flag
        }

    # Putting back

    def restore(self) -> None:
        """As they were remembered."""
        if self._remembers:
            if self._compared < COMPARED:  # a window that has failed is not learned from otherwise
                self._moving |= self._with_other_values()
            changed = self._changed()
            for held in changed:
                if not held.can_be_written_back:
                    held.reassign()
            _copy_all((held.tensor.data, held.copy) for held in changed if held.can_be_written_back)  # type: ignore[union-attr,misc]
            self._remove_new()

    def restore_if(self, found_inf: Tensor) -> None:
        """The same where the flag is not 0. The host waits if a buffer has come, gone or changed its shape."""
        if not self._remembers:
            return
        conditionals: dict[torch.device, Conditional] = {}
        host_decides = []
        for held in self._changed():
            now = held.now
            if not (held.can_be_written_back or held.was_replaced_by_one_alike):
                host_decides.append(held)
                continue
            assert now is not None
            assert held.copy is not None
            if now is not held.tensor:  # whose memory may be anybody's, such as the batch's
                now = held.place.module._buffers[held.place.name] = now.detach().clone()
            conditionals.setdefault(now.device, Conditional()).add(now.data, held.copy)
        for device, conditional in conditionals.items():
            conditional.copy_if_(there(found_inf, device))
        if (host_decides or self._came()) and found_inf.item():
            for held in host_decides:
                held.reassign()
            self._remove_new()

    def _changed(self) -> list[Held]:
        """Those to put back. What is written to behind torch's back is to be copied each time from then on."""
        changed = [held for held in self._held.values() if held.place in self._moving or held.has_changed]
        self._moving |= {held.place for held in changed}
        return [held for held in changed if held.known]

    def _remove_new(self) -> None:
        for place in self._came():
            del place.module._buffers[place.name]

    # Saving

    def state(self) -> dict[str, Tensor]:
        """What was remembered of those that have changed since, by name."""
        found = self._changed() if self._remembers else []
        return {held.path: held.copy.clone() for held in found if held.copy is not None and _is_plain(held.copy)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` returned, for the same models; others are as they are now."""
        self.remember()
        by_path = {held.path: held for held in self._held.values()}
        for path, value in state.items():
            held = by_path.get(path)
            copy = None if held is None else held.copy
            if held is None or copy is None or not isinstance(value, Tensor) or value.shape != copy.shape:
                raise BadInput(f"buffer {path[:80]!r} cannot be loaded: load this for the model it was saved with.")
            copy.copy_(value)
            self._moving.add(held.place)


def _stamp(tensor: Tensor | None) -> tuple[int, ...]:
    """What torch counts of writes to it, and where it lies."""
    if tensor is None or is_lazy(tensor) or tensor.is_inference():
        return ()
    return (tensor._version, tensor.data_ptr()) if _is_plain(tensor) else (tensor._version,)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in memory that can be copied to and from, each in a place of its own."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _copy_all(pairs: Iterable[Pair]) -> None:
    """From the second to the first of each, with few launches; as whole numbers, as some dtypes have no kernel."""
    by_kind: dict[tuple[torch.device, torch.device, int], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_kind.setdefault((target.device, source.device, target.itemsize), ([], []))
        targets.append(as_numbers(target))
        sources.append(as_numbers(source))
    for targets, sources in by_kind.values():
        torch._foreach_copy_(targets, sources)
