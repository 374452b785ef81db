"""Running statistics that a skipped step leaves as they were.

The forward pass of BatchNorm and its kin moves their running statistics before anyone knows whether the step will
count: an overflow would leave NaN there for ever. So they are copied before it, and put back where it was skipped.
On a GPU only the device knows; ``statistics_kernel.py`` puts all of them back in one launch, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.census.launcher import has_kernels
from ampwise.engine.scaling.gradients import there
from ampwise.errors import BadInput

__all__ = ["Statistics"]

AS_MADE = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}  # what reset_running_stats() sets

Pair = tuple[Tensor, Tensor]  # target, source


@dataclass(slots=True, eq=False)
class Kept:
    """One buffer, looked up anew each time as others may take its place, and what it was."""

    layer: _NormBase
    name: str
    copy: Tensor | None = None
    remembered: bool = False

    @property
    def buffer(self) -> Tensor | None:
        """None too for one of a lazy layer that has not seen data yet."""
        buffer = self.layer._buffers.get(self.name)
        return None if buffer is None or is_lazy(buffer) else buffer

    def make_room(self) -> None:
        buffer = self.buffer
        if buffer is None:
            self.copy = None
        elif self.copy is None or not _are_alike(self.copy, buffer):
            self.copy = _room_for(buffer)

    def pair(self) -> Pair | None:
        """The buffer and the copy of it; None if there is nothing to put back, or nowhere."""
        buffer = self.buffer
        if buffer is None or not self.remembered:
            return None
        if self.copy is None:  # a lazy layer that has come to be since
            self.copy = _room_for(buffer).fill_(AS_MADE[self.name])
        if self.copy.shape != buffer.shape:
            raise BadInput(
                f"{self.name} of a {type(self.layer).__name__} had shape {tuple(self.copy.shape)} when it was "
                f"remembered, and has {tuple(buffer.shape)} now. Call remember() after changing a model."
            )
        return buffer, self.copy


class Arrangement:
    """Buffers and their copies, sorted for copying. Sorting takes longer than copying, so it is done once."""

    def __init__(self, everything: Iterable[Kept]) -> None:
        kept = [each for each in everything if each.remembered]
        # A layer's backward pass asks whether its statistics were changed since, though in training mode it makes no
        # use of them; .data does not tell, as the layer itself does not when it changes them.
        pairs = [(pair[0].data, pair[1]) for each in kept if (pair := each.pair()) is not None]
        self._complete = len(pairs) == len(kept)
        self._places = [(each.layer._buffers, each.name) for each in kept]
        self._buffers = self._found()
        self._addresses = self._found_at() if self._complete else []
        self._by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        self._by_device: dict[torch.device, Conditional] = {}
        for target, source in pairs:
            targets, sources = self._by_kind.setdefault((target.device, target.dtype), ([], []))
            targets.append(target)
            sources.append(source)
            self._by_device.setdefault(target.device, Conditional()).add(target, source)

    @property
    def stands(self) -> bool:
        """Whether the buffers are the same, in the same place."""
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
            conditional.copy_if_(there(found_inf, device))


class Conditional:
    """Copies on one device that a flag there decides on: by the kernel where it can, else one by one."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()  # for the kernel
        self._others: list[Pair] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        if target.is_cuda and has_kernels() and _is_readable(target, source):
            self._rows += (source.data_ptr(), target.data_ptr(), source.nbytes)
        else:
            self._others.append((target, source))

    def copy_if_(self, found_inf: Tensor) -> None:
        if self._rows:
            from ampwise.engine.statistics_kernel import launch_copy_if_

            launch_copy_if_(self._rows, found_inf)
        for target, source in self._others:
            target.copy_(torch.where(found_inf != 0, source.to(target), target))


class Statistics:
    """The running statistics of a model's normalisation layers, which a skipped step must not change.

    The layers are looked for once. A call of ``remember`` is good for any number of restores.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = dict.fromkeys(layer for module in modules for layer in module.modules())
        self._kept = [
            Kept(layer, name)
            for layer in found
            if isinstance(layer, _NormBase)
            for name in AS_MADE
            if layer._buffers.get(name) is not None
        ]
        self._layers = list(dict.fromkeys(kept.layer for kept in self._kept))
        self._moving: list[bool] = []  # of the layers, when the arrangement was made
        self._arranged: Arrangement | None = None

    def __len__(self) -> int:
        """How many layers have running statistics; with none, there is nothing to do."""
        return len(self._layers)

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the statistics as they are now, of layers in training mode. Nothing waits."""
        moving = self._now_moving()
        if self._arranged is None or moving != self._moving or not self._arranged.stands:
            self._moving, self._arranged = moving, self._arrangement_of(moving)
        self._arranged.remember()

    @torch.no_grad()
    def remember_new(self) -> None:
        """Copy besides those of layers that have come into training mode since; others stay as remembered."""
        moving = self._now_moving()
        if moving == self._moving:
            return
        came = dict(zip(self._layers, moving, strict=True))
        for kept in self._kept:
            if came[kept.layer] and not kept.remembered:
                kept.make_room()
                kept.remembered = True
                if (pair := kept.pair()) is not None:
                    pair[1].copy_(pair[0])
        self._moving, self._arranged = moving, None

    @property
    def moves(self) -> bool:
        """A forward pass would change some of them."""
        return any(self._now_moving())

    def _now_moving(self) -> list[bool]:
        return [layer.training and layer.track_running_stats for layer in self._layers]

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Put back what was remembered where ``found_inf`` is 1; where it is 0, nothing changes.

        Nothing waits, unless the statistics are on the CPU and ``found_inf`` is not.
        """
        if found_inf.device.type != "cpu":
            self._standing().restore_if(found_inf)
        elif found_inf.item():
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was remembered."""
        self._standing().restore()

    def forget(self) -> None:
        """Nothing is remembered any more; the memory of the copies is kept for the next time."""
        for kept in self._kept:
            kept.remembered = False
        self._arranged = None

    @torch.no_grad()
    def state(self) -> list[Tensor] | None:
        """What was remembered, for a checkpoint; None if nothing was.

        An entry for each buffer in the order of the model, of size 0 where it was not remembered.
        """
        if not any(kept.remembered for kept in self._kept):
            return None
        pairs = [kept.pair() for kept in self._kept]
        return [torch.empty(0) if pair is None else pair[1].clone() for pair in pairs]

    @torch.no_grad()
    def load(self, state: Sequence[Tensor] | None) -> None:
        """Take up what ``state`` returned, for the same model. None: nothing is remembered."""
        if state is None:
            self.forget()
            return
        if len(state) != len(self._kept):
            raise BadInput(
                f"the running statistics of {len(state)} buffers cannot be loaded into {len(self._kept)}: "
                "load them for the model they were saved with."
            )
        found = [_matched(kept, tensor) for kept, tensor in zip(self._kept, state, strict=True)]
        for kept, copy in zip(self._kept, found, strict=True):
            kept.copy, kept.remembered = copy, copy is not None
        self._arranged = None

    def _arrangement_of(self, moving: Iterable[bool]) -> Arrangement:
        are_moving = dict(zip(self._layers, moving, strict=True))
        for kept in self._kept:
            kept.remembered = are_moving[kept.layer]
            if kept.remembered:
                kept.make_room()
        return Arrangement(self._kept)

    def _standing(self) -> Arrangement:
        """Of the buffers that are there now, which may not be those that were remembered."""
        return self._arranged if self._arranged is not None and self._arranged.stands else Arrangement(self._kept)


def _matched(kept: Kept, tensor: Tensor) -> Tensor | None:
    """A copy of a loaded tensor, as the buffer is; None if it was not remembered."""
    if not isinstance(tensor, Tensor):
        raise BadInput(f"{kept.name}: a tensor is expected, not {type(tensor).__name__}. Load what state() returned.")
    buffer = kept.buffer
    if buffer is not None and tensor.shape == buffer.shape:
        return _room_for(buffer).copy_(tensor)
    if tensor.shape == (0,):
        return None
    shape = "none yet" if buffer is None else tuple(buffer.shape)
    raise BadInput(
        f"{kept.name} of shape {tuple(tensor.shape)} cannot be loaded for a {type(kept.layer).__name__} whose shape "
        f"is {shape}: load the model's own state first, and this for the model it was saved with."
    )


def _room_for(buffer: Tensor) -> Tensor:
    with torch.inference_mode(False):  # it outlives a block that the first step may be in
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and one.shape == other.shape


def _is_readable(target: Tensor, source: Tensor) -> bool:
    """Whether the kernel can copy it byte by byte. The address of a subclass of tensors may mean nothing."""
    return _are_alike(target, source) and type(target) is Tensor and target.is_contiguous() and source.is_contiguous()
