"""Back up buffers that a forward pass changes, in any module: averages of activations, codebooks, counters, caches.

A copy of each buffer stays valid until the buffer is written to or replaced, which torch's version counter shows, so a
buffer that never changes is copied once. Writes to ``buffer.data`` do not show there; such buffers are found by
comparing values in the first windows. A buffer that has changed once is copied before every window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.train.conditional_copy import ConditionalCopy, TensorPair, as_integers, empty_copy, same_layout
from ampwise.train.scaler.gradients import to_device

__all__ = ["BufferRef", "OtherBuffers"]

MAX_BYTES_ON_DEVICE = 64 * 2**20  # bytes for copies of buffers that have not changed yet; further copies go to the host
COMPARED_WINDOWS = 3  # windows in which values are compared


class BufferRef(NamedTuple):
    """A buffer's module and name."""

    module: Module
    name: str


@dataclass(slots=True, eq=False)
class BufferBackup:
    """A buffer and its backup."""

    place: BufferRef
    path: str
    tensor: Tensor | None = None  # the tensor backed up; the module may hold another by now
    stamp: tuple[int, ...] = ()
    copy: Tensor | None = None
    known: bool = False  # there is a backup, even if only of the fact that there was no buffer

    @property
    def now(self) -> Tensor | None:
        return self.place.module._buffers.get(self.place.name)

    @property
    def has_changed(self) -> bool:
        now = self.now
        return not self.known or now is not self.tensor or _stamp(now) != self.stamp

    def hold(self, *, on_host: bool) -> TensorPair | None:
        """Back up the current tensor; return the copy to make (target, source), if any."""
        now = self.now
        self.known = now is None or not is_lazy(now)
        self.tensor, self.stamp = (now, _stamp(now)) if self.known else (None, ())
        if now is None or not self.known:
            self.copy = None
        elif not _is_plain(now):
            self.copy = None if now.is_inference() else now.detach().clone()  # inference tensors cannot be written to
        else:
            if self.copy is None or not same_layout(self.copy, now, on_host=on_host):
                self.copy = empty_copy(now, on_host=on_host)
            return self.copy, now.detach()
        return None

    @property
    def can_be_written_back(self) -> bool:
        """Whether the module still holds the tensor that was backed up, and the copy fits it."""
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
        """Put the backed-up tensor back into the module, or a new one with its values if it was written to since."""
        tensor = self.tensor
        if tensor is not None and self.copy is not None and _stamp(tensor) != self.stamp:
            tensor = self.copy.to(tensor.device, copy=True)
        self.place.module._buffers[self.place.name] = tensor


class OtherBuffers:
    """Backup of all buffers of models, except those in ``besides``, which are backed up elsewhere.

    alike: another backup of the same models; the two share what they learn about which buffers change.
    """

    def __init__(
        self, models: Sequence[Module], besides: Iterable[BufferRef] = (), alike: OtherBuffers | None = None
    ) -> None:
        self._besides = frozenset(besides)
        self._modules: dict[Module, str] = {}
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                self._modules.setdefault(module, f"{number}.{name}")
        self._dicts = [module._buffers for module in self._modules]
        self._held: dict[BufferRef, BufferBackup] = {}
        self._count = 0  # number of buffers at the last search
        self._moving: set[BufferRef] = set() if alike is None else alike._moving
        self._remembers = False
        self._compared = 0  # windows
        self._on_device = 0  # bytes of copies of buffers that have not changed yet

    # Backing up

    def remember(self) -> None:
        """Back up the buffers as they are now. Syncs only for large buffers, the first time."""
        self._look_for_new()
        changed = [held for held in self._held.values() if held.place in self._moving or held.has_changed]
        _copy_all(pair for held in changed if (pair := held.hold(on_host=self._goes_to_host(held))) is not None)
        self._remembers = True

    def forget(self) -> None:
        self._remembers = False

    def _look_for_new(self) -> None:
        for place in self._came():
            self._held[place] = BufferBackup(place, f"{self._modules[place.module]}.{place.name}")
        self._count = sum(map(len, self._dicts))

    def _came(self) -> list[BufferRef]:
        """Return buffers that appeared since the last search."""
        if sum(map(len, self._dicts)) == self._count:
            return []
        places = (BufferRef(module, name) for module in self._modules for name in module._buffers)
        return [place for place in places if place not in self._held and place not in self._besides]

    def _goes_to_host(self, held: BufferBackup) -> bool:
        now = held.now
        if now is None or now.device.type == "cpu" or held.place in self._moving or not _is_plain(now):
            return False
        if held.copy is not None:
            return held.copy.device.type == "cpu"
        self._on_device += now.nbytes
        return self._on_device > MAX_BYTES_ON_DEVICE

    # Learning

    def learn(self) -> None:
        """Note which buffers changed in the last window: they are copied before every window from now on."""
        if not self._remembers:
            return
        self._moving |= {held.place for held in self._held.values() if held.has_changed}
        if self._compared < COMPARED_WINDOWS:
            self._compared += 1
            self._moving |= self._with_other_values()

    def _with_other_values(self) -> set[BufferRef]:
        still = [held for held in self._held.values() if held.place not in self._moving]
        differ: dict[torch.device, list[tuple[BufferRef, Tensor]]] = {}
        for held in still:
            now = held.now
            if held.can_be_written_back and now is not None and held.copy is not None:
                flag = (as_integers(now) != as_integers(held.copy.to(now.device))).any()
                differ.setdefault(now.device, []).append((held.place, flag))
        return {
            place
            for found in differ.values()
            for (place, _), flag in zip(found, torch.stack([flag for _, flag in found]).tolist(), strict=True)
            if flag
        }

    # Restoring

    def restore(self) -> None:
        """Restore the buffers from the backup."""
        if self._remembers:
            if self._compared < COMPARED_WINDOWS:  # learn() is not called for a failed window
                self._moving |= self._with_other_values()
            changed = self._changed()
            for held in changed:
                if not held.can_be_written_back:
                    held.reassign()
            _copy_all((held.tensor.data, held.copy) for held in changed if held.can_be_written_back)  # type: ignore[union-attr,misc]
            self._remove_new()

    def restore_if(self, found_inf: Tensor) -> None:
        """Restore the buffers if the flag is not 0. Syncs only if a buffer appeared, went or changed its shape."""
        if not self._remembers:
            return
        conditionals: dict[torch.device, ConditionalCopy] = {}
        host_decides = []
        for held in self._changed():
            now = held.now
            if not (held.can_be_written_back or held.was_replaced_by_one_alike):
                host_decides.append(held)
                continue
            assert now is not None
            assert held.copy is not None
            if now is not held.tensor:  # the new tensor may share memory with another, such as the batch
                now = held.place.module._buffers[held.place.name] = now.detach().clone()
            conditionals.setdefault(now.device, ConditionalCopy()).add(now.data, held.copy)
        for device, conditional in conditionals.items():
            conditional.copy_if_(to_device(found_inf, device))
        if (host_decides or self._came()) and found_inf.item():
            for held in host_decides:
                held.reassign()
            self._remove_new()

    def _changed(self) -> list[BufferBackup]:
        """Return the buffers to restore, and mark them to be copied before every window."""
        changed = [held for held in self._held.values() if held.place in self._moving or held.has_changed]
        self._moving |= {held.place for held in changed}
        return [held for held in changed if held.known]

    def _remove_new(self) -> None:
        for place in self._came():
            del place.module._buffers[place.name]

    # Saving

    def state(self) -> dict[str, Tensor]:
        """Return the backups of buffers that have changed since, by name."""
        found = self._changed() if self._remembers else []
        return {held.path: held.copy.clone() for held in found if held.copy is not None and _is_plain(held.copy)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned, for the same models; other buffers are backed up as they are now."""
        self.remember()
        by_path = {held.path: held for held in self._held.values()}
        for path, value in state.items():
            held = by_path.get(path)
            copy = None if held is None else held.copy
            if held is None or copy is None or not isinstance(value, Tensor) or value.shape != copy.shape:
                raise BadInput(f"buffer {path[:80]!r} does not fit this model. Load the state into the saved model.")
            copy.copy_(value)
            self._moving.add(held.place)


def _stamp(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the tensor's version counter and address."""
    if tensor is None or is_lazy(tensor) or tensor.is_inference():
        return ()
    return (tensor._version, tensor.data_ptr()) if _is_plain(tensor) else (tensor._version,)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the values are in ordinary memory, each at an address of its own."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _copy_all(pairs: Iterable[TensorPair]) -> None:
    """Copy the second tensor of each pair to the first, in few launches; as integers, as some dtypes have no kernel."""
    by_kind: dict[tuple[torch.device, torch.device, int], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_kind.setdefault((target.device, source.device, target.itemsize), ([], []))
        targets.append(as_integers(target))
        sources.append(as_integers(source))
    for targets, sources in by_kind.values():
        torch._foreach_copy_(targets, sources)
