"""Back up running statistics and all other buffers, so that a skipped step leaves them unchanged.

The forward pass of BatchNorm updates running statistics before it is known whether the step is skipped: an overflow
would leave NaN there for good. So they are copied before it, and restored if the step was skipped. On a GPU only the
device knows that; ``copy_if_kernel.py`` restores all of them in one launch, or none. Normalisation layers update
them in training mode, and torch's version counter does not show it.

``OtherBuffers`` handles all other buffers: averages of activations, codebooks, counters, caches. A copy of each stays
valid until the buffer is written to or replaced, which torch's version counter shows, so a buffer that never changes is
copied once. Writes to ``buffer.data`` do not show there; such buffers are found by comparing values in the first
windows. A buffer that has changed once is copied before every window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.numbers.census.kernels import has_kernels
from ampwise.train.scaler.gradients import to_device

__all__ = ["BufferSnapshot", "ConditionalCopy", "OtherBuffers"]

INITIAL_VALUES = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}  # what reset_running_stats() sets
MAX_BYTES_ON_DEVICE = 64 * 2**20  # bytes for copies of buffers that have not changed yet; further copies go to the host
COMPARED_WINDOWS = 3  # windows in which values are compared
INTEGER_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TensorPair = tuple[Tensor, Tensor]  # target, source


class ConditionalCopy:
    """Copies on one device, done if a flag there is set: in one kernel where possible, else one by one."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()  # for the kernel
        self._others: list[TensorPair] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        # The kernel copies bytes; the address of a tensor subclass may be invalid.
        plain = type(target) is Tensor and target.is_contiguous() and source.is_contiguous()
        if target.is_cuda and has_kernels() and plain and same_layout(target, source):
            self._rows += (source.data_ptr(), target.data_ptr(), source.nbytes)
        else:
            self._others.append((target, source))

    def copy_if_(self, found_inf: Tensor) -> None:
        if self._rows:
            from ampwise.train.copy_if_kernel import launch_copy_if_

            launch_copy_if_(self._rows, found_inf)
        for target, source in self._others:
            bits = as_integers(target)
            bits.copy_(torch.where(found_inf != 0, as_integers(source.to(target)), bits))


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's bits as integers, which torch can compare and select for every dtype."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(INTEGER_BY_SIZE[parts.itemsize])


def empty_copy(buffer: Tensor, *, on_host: bool = False) -> Tensor:
    """Return an empty tensor like this one, on its device or on the host."""
    with torch.inference_mode(False):  # it outlives an inference_mode block around the first step
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu" if on_host else buffer.device)


def same_layout(one: Tensor, other: Tensor, *, on_host: bool = False) -> bool:
    """Return whether the first has dtype, shape and device of ``empty_copy(other)``."""
    device = torch.device("cpu") if on_host else other.device
    return one.dtype == other.dtype and one.device == device and one.shape == other.shape


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
    version: int | None = None  # of the tensor; None if it has none
    address: int | None = None  # of the tensor; None if it is not plain
    copy: Tensor | None = None
    known: bool = False  # there is a backup, even if only of the fact that there was no buffer

    @property
    def now(self) -> Tensor | None:
        return self.place.module._buffers.get(self.place.name)

    @property
    def has_changed(self) -> bool:
        now = self.place.module._buffers.get(self.place.name)
        return not self.known or now is not self.tensor or self.was_written

    @property
    def was_written(self) -> bool:
        """Whether the tensor backed up was written to since, or moved to other memory."""
        tensor = self.tensor
        if tensor is None or self.version is None:
            return False
        return tensor._version != self.version or (self.address is not None and tensor.data_ptr() != self.address)

    def hold(self, *, on_host: bool) -> TensorPair | None:
        """Back up the current tensor; return the copy to make (target, source), if any."""
        now = self.now
        self.known = now is None or not is_lazy(now)
        self.tensor = now if self.known else None
        self.version = self.address = None
        if now is None or not self.known:
            self.copy = None
            return None
        plain = _is_plain(now)
        if not now.is_inference():
            self.version, self.address = now._version, now.data_ptr() if plain else None
        if plain:
            if self.copy is None or not same_layout(self.copy, now, on_host=on_host):
                self.copy = empty_copy(now, on_host=on_host)
            return self.copy, now.detach()
        self.copy = None if now.is_inference() else now.detach().clone()  # inference tensors cannot be written to
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
        if tensor is not None and self.copy is not None and self.was_written:
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
        for place in self._came():
            self._held[place] = BufferBackup(place, f"{self._modules[place.module]}.{place.name}")
        self._count = sum(map(len, self._dicts))
        self._remembers = True
        pairs = []
        for place, held in self._held.items():
            if place in self._moving or held.has_changed:
                pair = held.hold(on_host=self._goes_to_host(held))
                if pair is not None:
                    pairs.append(pair)
        if pairs:
            _copy_all(pairs)

    def forget(self) -> None:
        self._remembers = False

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
        if not self._remembers or not self._held:
            return
        for place, held in self._held.items():
            if place not in self._moving and held.has_changed:
                self._moving.add(place)
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


@dataclass(slots=True, eq=False)
class NormBufferBackup:
    """A buffer of a normalisation layer, looked up each time as it may be replaced, and its backup."""

    layer: _NormBase
    name: str
    copy: Tensor | None = None
    remembered: bool = False

    @property
    def buffer(self) -> Tensor | None:
        """The buffer; None if there is none, or if its lazy layer has not seen data yet."""
        buffer = self.layer._buffers.get(self.name)
        return None if buffer is None or is_lazy(buffer) else buffer

    def allocate_copy(self) -> None:
        buffer = self.buffer
        if buffer is None:
            self.copy = None
        elif self.copy is None or not same_layout(self.copy, buffer):
            self.copy = empty_copy(buffer)

    def pair(self) -> TensorPair | None:
        """Return the buffer and its copy; None if one of them does not exist."""
        buffer = self.buffer
        if buffer is None or not self.remembered:
            return None
        if self.copy is None:  # a lazy layer, initialised since the backup
            self.copy = empty_copy(buffer).fill_(INITIAL_VALUES[self.name])
        if self.copy.shape != buffer.shape:
            raise BadInput(
                f"{self.name} of a {type(self.layer).__name__} changed its shape within a step, from "
                f"{tuple(self.copy.shape)} to {tuple(buffer.shape)}. Change a model only between steps."
            )
        return buffer, self.copy


class NormCopyPlan:
    """Buffers and their copies, grouped for copying. Grouping takes longer than copying, so it is done once."""

    def __init__(self, everything: Iterable[NormBufferBackup]) -> None:
        kept = [each for each in everything if each.remembered]
        # Writes through .data do not raise the version counter. Else the layer's backward pass would report that its
        # statistics were modified in place, though in training mode it does not use them.
        pairs = [(pair[0].data, pair[1]) for each in kept if (pair := each.pair()) is not None]
        self._complete = len(pairs) == len(kept)
        self._places = [(each.layer._buffers, each.name) for each in kept]
        self._buffers = self._found()
        self._addresses = list(map(Tensor.data_ptr, self._buffers)) if self._complete else []
        self._by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        self._by_device: dict[torch.device, ConditionalCopy] = {}
        for target, source in pairs:
            targets, sources = self._by_kind.setdefault((target.device, target.dtype), ([], []))
            targets.append(target)
            sources.append(source)
            self._by_device.setdefault(target.device, ConditionalCopy()).add(target, source)

    @property
    def stands(self) -> bool:
        """Whether the buffers are still the same tensors at the same addresses."""
        if not self._complete or not all(map(is_, self._found(), self._buffers)):
            return False
        return list(map(Tensor.data_ptr, self._buffers)) == self._addresses

    def _found(self) -> list[Any]:
        return [buffers.get(name) for buffers, name in self._places]

    def remember(self) -> None:
        for targets, sources in self._by_kind.values():
            torch._foreach_copy_(sources, targets)

    def restore(self) -> None:
        for targets, sources in self._by_kind.values():
            torch._foreach_copy_(targets, sources)

    def restore_if(self, found_inf: Tensor) -> None:
        for device, conditional in self._by_device.items():
            conditional.copy_if_(to_device(found_inf, device))


class BufferSnapshot:
    """Backup of running statistics and all other buffers of models, which a skipped step must not change.

    Layers are searched for once. After ``remember``, buffers can be restored any number of times. alike: another backup
    of the same models; the two share what they learn about which buffers change.
    """

    def __init__(self, modules: Iterable[nn.Module], alike: BufferSnapshot | None = None) -> None:
        models = list(modules)
        found = [layer for model in models for layer in model.modules() if isinstance(layer, _NormBase)]
        norms = list(dict.fromkeys(found))
        self._kept = [
            NormBufferBackup(layer, name)
            for layer in norms
            for name in INITIAL_VALUES
            if layer._buffers.get(name) is not None
        ]
        self._layers = list(dict.fromkeys(kept.layer for kept in self._kept))
        self._moving: list[bool] = []  # which layers update statistics, when they were last grouped
        self._arranged: NormCopyPlan | None = None
        ours = (BufferRef(layer, name) for layer in norms for name in INITIAL_VALUES)
        theirs: OtherBuffers | None = None if alike is None else alike._others
        self._others: OtherBuffers = OtherBuffers(models, ours, theirs)

    def __len__(self) -> int:
        """Number of normalisation layers with running statistics."""
        return len(self._layers)

    @torch.no_grad()
    def remember(self) -> None:
        """Back up the statistics of layers in training mode, and all other buffers that have changed."""
        if self._layers:
            moving = self._now_moving()
            if self._arranged is None or moving != self._moving or not self._arranged.stands:
                are_moving = dict(zip(self._layers, moving, strict=True))
                for kept in self._kept:
                    kept.remembered = are_moving[kept.layer]
                    if kept.remembered:
                        kept.allocate_copy()
                self._moving, self._arranged = moving, NormCopyPlan(self._kept)
            self._arranged.remember()
        self._others.remember()

    @torch.no_grad()
    def remember_new(self) -> None:
        """Also back up layers that were switched to training mode since; other backups stay."""
        moving = self._now_moving()
        if moving == self._moving:
            return
        came = dict(zip(self._layers, moving, strict=True))
        for kept in self._kept:
            if came[kept.layer] and not kept.remembered:
                kept.allocate_copy()
                kept.remembered = True
                if (pair := kept.pair()) is not None:
                    pair[1].copy_(pair[0])
        self._moving, self._arranged = moving, None

    @property
    def moves(self) -> bool:
        """Whether a forward pass would change running statistics."""
        return any(self._now_moving())

    def _now_moving(self) -> list[bool]:
        return [layer.training and layer.track_running_stats for layer in self._layers]

    @torch.no_grad()
    def end_window(self, skipped: Tensor | bool) -> None:
        """Note which buffers have changed, and restore the backup if the step was skipped.

        On a device, ``skipped`` is a tensor that is 0 or 1. Syncs only if buffers are on the CPU and ``skipped`` is
        not, if a buffer appeared, went or changed its shape, and in the first few windows.
        """
        self._others.learn()
        if isinstance(skipped, Tensor) and not skipped.is_cpu:
            self._restore_if(skipped)
        elif skipped:
            self.restore()

    def _restore_if(self, found_inf: Tensor) -> None:
        if self._layers:
            self._standing().restore_if(found_inf)
        self._others.restore_if(found_inf)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the backup."""
        if self._layers:
            self._standing().restore()
        self._others.restore()

    def forget(self) -> None:
        """Drop the backup; the memory of the copies is kept for the next one."""
        for kept in self._kept:
            kept.remembered = False
        self._arranged = None
        self._others.forget()

    @torch.no_grad()
    def state(self) -> dict[str, Any] | None:
        """Return the backup for a checkpoint; None if there is none.

        norms: a tensor for each buffer of normalisation layers in the model's order, of size 0 if not backed up.
        others: buffers that have changed since, by name.
        """
        others = self._others.state()
        if not others and not any(kept.remembered for kept in self._kept):
            return None
        pairs = [kept.pair() for kept in self._kept]
        norms = [torch.empty(0) if pair is None else pair[1].clone() for pair in pairs]
        return {"norms": norms, "others": others}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load what ``state`` returned, for the same model. None drops the backup."""
        if state is None:
            self.forget()
            return
        norms = state["norms"]
        if len(norms) != len(self._kept):
            raise BadInput(
                f"expected running statistics of {len(self._kept)} buffers, got {len(norms)}. Load them into the model "
                "they were saved with."
            )
        found = [_matched(kept, tensor) for kept, tensor in zip(self._kept, norms, strict=True)]
        self._others.load(state["others"])
        for kept, copy in zip(self._kept, found, strict=True):
            kept.copy, kept.remembered = copy, copy is not None
        self._arranged = None

    def _standing(self) -> NormCopyPlan:
        """Return the grouping for the current buffers, which may not be those that were backed up."""
        return self._arranged if self._arranged is not None and self._arranged.stands else NormCopyPlan(self._kept)


def _matched(kept: NormBufferBackup, tensor: Tensor) -> Tensor | None:
    """Return a copy of a loaded tensor in the buffer's dtype and device; None if it was not backed up."""
    if not isinstance(tensor, Tensor):
        raise BadInput(f"{kept.name}: expected a tensor, got {type(tensor).__name__}. Load what state() returned.")
    buffer = kept.buffer
    if buffer is not None and tensor.shape == buffer.shape:
        return empty_copy(buffer).copy_(tensor)
    if tensor.shape == (0,):
        return None
    shape = "none yet" if buffer is None else tuple(buffer.shape)
    raise BadInput(
        f"{kept.name} of shape {tuple(tensor.shape)} does not fit a {type(kept.layer).__name__} of shape {shape}. Load "
        "the model's own state first, and this into the model it was saved with."
    )
