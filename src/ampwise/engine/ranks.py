"""Models on several ranks: gradients are exchanged once a window, and numbers are agreed upon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from ampwise.errors import BadInput
from ampwise.printers.terminal import say

__all__ = ["Ranks", "rank", "speaks"]

AS_THEY_DO: AbstractContextManager[Any] = nullcontext()


def rank() -> int:
    """This process among others; 0 where there are none."""
    return dist.get_rank() if _has_others() else 0


def speaks() -> bool:
    """Of several ranks the first speaks."""
    return rank() == 0


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The wrappers that exchange gradients, found in a model: DDP and FSDP1 by ``no_sync``, FSDP2 by its switch."""

    def __init__(self, models: Sequence[Module], process_group: Any | None = None) -> None:
        found = [module for model in models for module in model.modules()]
        self._holding: list[Any] = [each for each in found if callable(getattr(each, "no_sync", None))]
        sharded: list[Any] = [each for each in found if callable(getattr(each, "set_requires_gradient_sync", None))]
        inner = {id(inside) for outer in sharded for inside in outer.modules() if inside is not outer}
        self._sharded = [module for module in sharded if id(module) not in inner]
        unwrapped = [each for each in self._holding if not isinstance(each, DistributedDataParallel)]
        synced = [each for each in found if isinstance(each, SyncBatchNorm)]
        self._has_exchanges = bool(unwrapped or sharded or synced)
        self._exchanging = True  # as FSDP2's switch is set
        # With static_graph, DDP learns the graph in its first pass, and fails unless it exchanges in that.
        self._learning = any(getattr(each, "static_graph", False) for each in self._holding)
        self._divided = any(hasattr(each, "placements") for model in models for each in model.parameters())
        self.process_group = process_group
        if process_group is None and self._holding:
            self.process_group = getattr(self._holding[0], "process_group", None)

    @property
    def several(self) -> bool:
        """The model is spread over ranks, or copied to them."""
        return bool(self._holding or self._sharded) and _has_others()

    @property
    def alone(self) -> bool:
        """No other rank has a copy or a part of the model."""
        together = self._holding or self._sharded or self._divided or self.process_group is not None
        return not (together and _has_others())

    @property
    def in_step(self) -> bool:
        """A forward pass has exchanges in it: each rank must run as many as the others."""
        return self._has_exchanges and self.several

    @property
    def speaks(self) -> bool:
        return speaks()

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Each rank by itself, where the wrapper is all that exchanges: what it wraps is called in its place."""
        wrappers = [each for each in self._holding if isinstance(each, DistributedDataParallel)]
        for wrapper in wrappers:
            wrapper.__dict__["forward"] = wrapper.module
        try:
            yield
        finally:
            for wrapper in wrappers:
                del wrapper.__dict__["forward"]

    def exchanging(self, wanted: bool) -> AbstractContextManager[Any]:
        """A micro-batch, forward and backward: gradients are exchanged in the last of a window only."""
        self._switch(wanted)
        return AS_THEY_DO if wanted or self._learning or not self._holding else self._without_exchange()

    def window_closed(self) -> None:
        """What there was to learn is learned."""
        self._learning = False

    @contextmanager
    def _without_exchange(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._holding:
                stack.enter_context(module.no_sync())
            yield

    def _switch(self, wanted: bool) -> None:
        if wanted != self._exchanging:
            for module in self._sharded:
                module.set_requires_gradient_sync(wanted)
            self._exchanging = wanted

    def exchange_late(self) -> None:
        """Exchange gradients of a window that ended before its last micro-batch."""
        if not self.several:
            return
        if self._sharded or not all(hasattr(module, "reducer") for module in self._holding):
            raise BadInput(
                "flush(): sharded gradients are exchanged in the backward pass only. Let the engine know the end of "
                "the data beforehand: for batch in engine.batches(loader)."
            )
        for module in self._holding:
            ignored = set(getattr(module, "parameters_to_ignore", ()))
            named = [(name, each) for name, each in module.module.named_parameters() if each.grad is not None]
            _average_([each.grad for name, each in named if name not in ignored], module.process_group)

    def drop_unexchanged(self) -> None:
        """Gradients of an open window that FSDP2 keeps to itself."""
        for module in self._sharded:
            for inner in module.modules():
                if hasattr(inner, "_get_fsdp_state"):
                    _drop_kept_by(inner._get_fsdp_state())

    def refuse_open_window(self) -> None:
        """Before saving: FSDP2 keeps the gradients of an open window to itself."""
        if self._sharded:
            raise BadInput(
                "state_dict() in the middle of a window: FSDP2 has its gradients, and does not give them. Save when "
                "step.closed is true."
            )

    def mean(self, number: float | Tensor, device: torch.device) -> float | Tensor:
        """Over all ranks, the same on each."""
        if not self.several:
            return number
        shared = torch.as_tensor(number, dtype=torch.float64, device=device).clone()
        dist.all_reduce(shared, group=self.process_group)
        return shared / dist.get_world_size(self.process_group)

    def warn_if_apart(self, parameters: Sequence[Tensor]) -> None:
        """Several ranks, and nothing that exchanges gradients."""
        if not _has_others() or dist.get_world_size() == 1 or self.several:
            return
        if self.process_group is None and not any(hasattr(each, "placements") for each in parameters) and speaks():
            say(
                "ampwise: {} ranks, and the model is neither wrapped in DDP nor sharded: each rank trains by itself.",
                dist.get_world_size(),
            )

    def refuse_different(self, chosen: str) -> None:
        """Ranks on unlike devices would choose unlike precisions, and train apart."""
        if not self.several:
            return
        everyone: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(everyone, chosen, group=self.process_group)
        if len(set(everyone)) > 1:
            of_each = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(everyone))
            raise BadInput(
                f"Engine(precision='auto'): the ranks' devices differ: {of_each}. Name one that all can run."
            )


def _average_(gradients: Sequence[Tensor], group: Any) -> None:
    """In place, over ranks, those of a dtype in one exchange."""
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _drop_kept_by(state: Any) -> None:
    """Private to torch, where there is no other way: set what it would add to the next exchange to nothing."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for kept in (kept for group in groups if group is not None for kept in group.fsdp_params):
        kept.unsharded_accumulated_grad = None
        if hasattr(kept, "_unsharded_param"):
            kept._unsharded_param.grad = None
