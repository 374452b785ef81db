"""Running statistics, and whatever else a forward pass changes, that a skipped step leaves as they were.

The forward pass of BatchNorm and its kin moves their running statistics before anyone knows whether the step will
count: an overflow would leave NaN there for ever. So they are copied before it, and put back where it was skipped.
On a GPU only the device knows; ``statistics_kernel.py`` puts all of them back in one launch, or none. Layers of these
kinds do so in training mode, and torch does not count their writes; ``forward_buffers.py`` has the buffers of others.
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

from ampwise.engine.conditional import Conditional, Pair, are_alike, room_for
from ampwise.engine.forward_buffers import ForwardBuffers, Place
from ampwise.engine.scaling.gradients import there
from ampwise.errors import BadInput

__all__ = ["Statistics"]

AS_MADE = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}  # what reset_running_stats() sets


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
        elif self.copy is None or not are_alike(self.copy, buffer):
            self.copy = room_for(buffer)

    def pair(self) -> Pair | None:
        """The buffer and the copy of it; None if there is nothing to put back, or nowhere."""
        buffer = self.buffer
        if buffer is None or not self.remembered:
            return None
        if self.copy is None:  # a lazy layer that has come to be since
            self.copy = room_for(buffer).fill_(AS_MADE[self.name])
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


class Statistics:
    """The running statistics of a model's normalisation layers and all other buffers, which a skipped step must not
    change.

    The layers are looked for once. A call of ``remember`` is good for any number of restores. alike: other ones of the
    same models, which learn together which buffers change.
    """

    def __init__(self, modules: Iterable[nn.Module], alike: Statistics | None = None) -> None:
        models = list(modules)
        found = [layer for model in models for layer in model.modules() if isinstance(layer, _NormBase)]
        norms = list(dict.fromkeys(found))
        self._kept = [Kept(layer, name) for layer in norms for name in AS_MADE if layer._buffers.get(name) is not None]
        self._layers = list(dict.fromkeys(kept.layer for kept in self._kept))
        self._moving: list[bool] = []  # of the layers, when the arrangement was made
        self._arranged: Arrangement | None = None
        ours = (Place(layer, name) for layer in norms for name in AS_MADE)
        theirs: ForwardBuffers | None = None if alike is None else alike._others
        self._others: ForwardBuffers = ForwardBuffers(models, ours, theirs)

    def __len__(self) -> int:
        """How many normalisation layers have running statistics."""
        return len(self._layers)

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the statistics as they are now, of layers in training mode, and what has changed of other buffers."""
        moving = self._now_moving()
        if self._arranged is None or moving != self._moving or not self._arranged.stands:
            self._moving, self._arranged = moving, self._arrangement_of(moving)
        self._arranged.remember()
        self._others.remember()

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
        """A forward pass would change some of the running statistics."""
        return any(self._now_moving())

    def _now_moving(self) -> list[bool]:
        return [layer.training and layer.track_running_stats for layer in self._layers]

    @torch.no_grad()
    def learn(self) -> None:
        """A window is over: see which buffers it has changed. Waits for the device in the first few windows."""
        self._others.learn()

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Put back what was remembered where ``found_inf`` is 1; where it is 0, nothing changes.

        Nothing waits, unless buffers are on the CPU and ``found_inf`` is not, or a buffer has come, gone or changed
        its shape.
        """
        if found_inf.device.type != "cpu":
            self._standing().restore_if(found_inf)
            self._others.restore_if(found_inf)
        elif found_inf.item():
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was remembered."""
        self._standing().restore()
        self._others.restore()

    def forget(self) -> None:
        """Nothing is remembered any more; the memory of the copies is kept for the next time."""
        for kept in self._kept:
            kept.remembered = False
        self._arranged = None
        self._others.forget()

    @torch.no_grad()
    def state(self) -> dict[str, Any] | None:
        """What was remembered, for a checkpoint; None if nothing was.

        norms: an entry for each buffer of normalisation layers in the order of the model, of size 0 where it was not
        remembered. others: those that have changed since, by name.
        """
        others = self._others.state()
        if not others and not any(kept.remembered for kept in self._kept):
            return None
        pairs = [kept.pair() for kept in self._kept]
        norms = [torch.empty(0) if pair is None else pair[1].clone() for pair in pairs]
        return {"norms": norms, "others": others}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up what ``state`` returned, for the same model. None: nothing is remembered."""
        if state is None:
            self.forget()
            return
        norms = state["norms"]
        if len(norms) != len(self._kept):
            raise BadInput(
                f"the running statistics of {len(norms)} buffers cannot be loaded into {len(self._kept)}: "
                "load them for the model they were saved with."
            )
        found = [_matched(kept, tensor) for kept, tensor in zip(self._kept, norms, strict=True)]
        self._others.load(state["others"])
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
        return room_for(buffer).copy_(tensor)
    if tensor.shape == (0,):
        return None
    shape = "none yet" if buffer is None else tuple(buffer.shape)
    raise BadInput(
        f"{kept.name} of shape {tuple(tensor.shape)} cannot be loaded for a {type(kept.layer).__name__} whose shape "
        f"is {shape}: load the model's own state first, and this for the model it was saved with."
    )
