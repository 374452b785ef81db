"""Back up running statistics and all other buffers, so that a skipped step leaves them unchanged.

The forward pass of BatchNorm updates running statistics before it is known whether the step is skipped: an overflow
would leave NaN there for good. So they are copied before it, and restored if the step was skipped. On a GPU only the
device knows that; ``copy_if_kernel.py`` restores all of them in one launch, or none. Normalisation layers update
them in training mode, and torch's version counter does not show it; ``other_buffers.py`` handles all other buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.errors import BadInput
from ampwise.train.conditional_copy import ConditionalCopy, TensorPair, empty_copy, same_layout
from ampwise.train.other_buffers import BufferRef, OtherBuffers
from ampwise.train.scaler.gradients import to_device

__all__ = ["BufferSnapshot"]

INITIAL_VALUES = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}  # what reset_running_stats() sets


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
        self._addresses = self._found_at() if self._complete else []
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
        return self._complete and all(map(is_, self._found(), self._buffers)) and self._found_at() == self._addresses

    def _found(self) -> list[Tensor | None]:
        return [buffers.get(name) for buffers, name in self._places]

    def _found_at(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._buffers if buffer is not None]

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
        moving = self._now_moving()
        if self._arranged is None or moving != self._moving or not self._arranged.stands:
            self._moving, self._arranged = moving, self._arrangement_of(moving)
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
    def learn(self) -> None:
        """Note which buffers the last window changed. Syncs with the device in the first few windows."""
        self._others.learn()

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Restore the backup if ``found_inf`` is 1; if it is 0, nothing changes.

        Syncs only if buffers are on the CPU and ``found_inf`` is not, or if a buffer appeared, went or changed its
        shape.
        """
        if found_inf.device.type != "cpu":
            self._standing().restore_if(found_inf)
            self._others.restore_if(found_inf)
        elif found_inf.item():
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the backup."""
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

    def _arrangement_of(self, moving: Iterable[bool]) -> NormCopyPlan:
        are_moving = dict(zip(self._layers, moving, strict=True))
        for kept in self._kept:
            kept.remembered = are_moving[kept.layer]
            if kept.remembered:
                kept.allocate_copy()
        return NormCopyPlan(self._kept)

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
