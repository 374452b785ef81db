"""Models on several ranks: exchange gradients once per step, and average numbers over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.train.accumulator import Accumulator
from ampwise.train.precision.contexts import NO_CONTEXT
from ampwise.train.precision.precision import TrainPrecision

__all__ = ["Fsdp2Dtypes", "Ranks", "fsdp2_dtypes", "is_main_process", "rank", "refuse_other_dtypes"]


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed."""
    return dist.get_rank() if _has_others() else 0


def is_main_process() -> bool:
    """Return whether this process prints messages: only rank 0 does."""
    return rank() == 0


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized()


class Fsdp2Dtypes(NamedTuple):
    """Dtypes that ``MixedPrecisionPolicy`` gives a model; None: those of its parameters and inputs."""

    compute: torch.dtype | None  # in which weights are gathered, and modules called
    reduce: torch.dtype | None  # in which gradients are summed over ranks
    output: torch.dtype | None  # of the whole model's output
    ranks: int  # over which they are summed, at most


def fsdp2_dtypes(model: Module) -> Fsdp2Dtypes | None:
    """Return the dtypes of the first module of a model that FSDP2 runs in another one; None if there is none."""
    module: Any
    for module in model.modules():
        if not callable(getattr(module, "_get_fsdp_state", None)):
            continue
        policy: Any = module._get_fsdp_state()._mp_policy
        if policy.param_dtype is None and policy.reduce_dtype is None:
            continue
        meshes = [each.device_mesh for each in module.parameters() if hasattr(each, "placements")]
        ranks = max((size for mesh in meshes[:1] for size in mesh.shape), default=1)
        output = policy.output_dtype or (policy.param_dtype if module is model else None)
        return Fsdp2Dtypes(policy.param_dtype, policy.reduce_dtype or policy.param_dtype, output, ranks)
    return None


def refuse_other_dtypes(model: Module, precision: TrainPrecision) -> None:
    """Raise if FSDP2 runs the model in another 16-bit dtype than the engine, or in FP16 without a loss scale."""
    dtypes = fsdp2_dtypes(model)
    compute = None if dtypes is None else dtypes.compute
    if compute not in (torch.float16, torch.bfloat16) or compute == precision.dtype:
        return
    if compute == torch.bfloat16 and precision.dtype is None and not precision.scaled:
        return  # FSDP does all casts, and BF16 needs no loss scale
    dtype, right = str(compute).removeprefix("torch."), "fp16" if compute == torch.float16 else "bf16"
    raise BadInput(
        f"Engine(precision={precision.name!r}): the model is sharded with MixedPrecisionPolicy(param_dtype="
        f"torch.{dtype}), which runs it in {right.upper()}. Use precision={right!r}, or a policy without param_dtype."
    )


class Ranks:
    """Modules that exchange gradients between ranks: DDP and FSDP1 (``no_sync``), and FSDP2 (its switch)."""

    def __init__(self, models: Sequence[Module], process_group: Any | None = None) -> None:
        found = [module for model in models for module in model.modules()]
        self._holding: list[Any] = [each for each in found if callable(getattr(each, "no_sync", None))]
        sharded: list[Any] = [each for each in found if callable(getattr(each, "set_requires_gradient_sync", None))]
        inner = {id(inside) for outer in sharded for inside in outer.modules() if inside is not outer}
        self._sharded = [module for module in sharded if id(module) not in inner]
        unwrapped = [each for each in self._holding if not isinstance(each, DistributedDataParallel)]
        synced = [each for each in found if isinstance(each, SyncBatchNorm)]
        self._has_exchanges = bool(unwrapped or sharded or synced)
        self._syncs = True  # the current setting of FSDP2's switch
        # With static_graph, DDP records the graph in its first pass, and fails unless it exchanges gradients there.
        self._learning = any(getattr(each, "static_graph", False) for each in self._holding)
        self._divided = any(hasattr(each, "placements") for model in models for each in model.parameters())
        self.process_group = process_group
        if process_group is None and self._holding:
            self.process_group = getattr(self._holding[0], "process_group", None)
        # Whether other ranks may take part in a step; if not, nothing else need be asked.
        self.distributed = bool(self._holding or self._sharded or self._divided or self.process_group is not None)

    @property
    def several(self) -> bool:
        """Whether the model is sharded over ranks or replicated on them."""
        return bool(self._holding or self._sharded) and _has_others()

    @property
    def alone(self) -> bool:
        """Whether no other rank has a replica or a shard of the model."""
        together = self._holding or self._sharded or self._divided or self.process_group is not None
        return not (together and _has_others())

    @property
    def in_step(self) -> bool:
        """Whether a forward pass communicates, so that all ranks must run the same number of passes."""
        return self._has_exchanges and self.several

    @property
    def speaks(self) -> bool:
        return is_main_process()

    @contextmanager
    def bypass_ddp(self) -> Iterator[None]:
        """Call the modules inside DDP wrappers directly, so that each rank runs without communication."""
        wrappers = [each for each in self._holding if isinstance(each, DistributedDataParallel)]
        for wrapper in wrappers:
            wrapper.__dict__["forward"] = wrapper.module
        try:
            yield
        finally:
            for wrapper in wrappers:
                del wrapper.__dict__["forward"]

    def gradient_sync(self, window: Accumulator) -> AbstractContextManager[Any]:
        """Return the context for a micro-batch's passes: gradients are exchanged only in the last of the window."""
        wanted = window.is_last
        if wanted != self._syncs:
            for module in self._sharded:
                module.set_requires_gradient_sync(wanted)
            self._syncs = wanted
        return NO_CONTEXT if wanted or self._learning or not self._holding else self._without_exchange()

    def step_closed(self) -> None:
        """Note that the first step is over: DDP has recorded its static graph."""
        self._learning = False

    @contextmanager
    def _without_exchange(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._holding:
                stack.enter_context(module.no_sync())
            yield

    def sync_now(self) -> None:
        """Exchange gradients of a step that ended before its last micro-batch."""
        if not self.several:
            return
        if self._sharded or not all(hasattr(module, "reducer") for module in self._holding):
            raise BadInput(
                "flush(): sharded gradients can only be exchanged in a backward pass. Iterate with "
                "engine.batches(loader), which finds the end of the data in time."
            )
        for module in self._holding:
            ignored = set(getattr(module, "parameters_to_ignore", ()))
            named = [(name, each) for name, each in module.module.named_parameters() if each.grad is not None]
            _average_([each.grad for name, each in named if name not in ignored], module.process_group)

    def drop_unsynced(self) -> None:
        """Drop gradients of an open window that FSDP2 holds internally."""
        for module in self._sharded:
            for inner in module.modules():
                if hasattr(inner, "_get_fsdp_state"):
                    _drop_kept_by(inner._get_fsdp_state())

    def require_closed_window(self) -> None:
        """Raise if FSDP2 holds the gradients of an open window, where they cannot be saved."""
        if self._sharded:
            raise BadInput(
                "state_dict() between the micro-batches of a step: FSDP2 holds the gradients internally, where they "
                "cannot be saved. Save when step.closed is true."
            )

    def mean(self, number: float | Tensor, device: torch.device) -> float | Tensor:
        """Return the mean over all ranks, the same on each."""
        if not self.several:
            return number
        shared = torch.as_tensor(number, dtype=torch.float64, device=device).clone()
        dist.all_reduce(shared, group=self.process_group)
        return shared / dist.get_world_size(self.process_group)

    def warn_if_not_synced(self, parameters: Sequence[Tensor]) -> None:
        """Log a warning if there are several ranks and nothing exchanges gradients."""
        if not _has_others() or dist.get_world_size() == 1 or self.several:
            return
        if (
            self.process_group is None
            and not any(hasattr(each, "placements") for each in parameters)
            and is_main_process()
        ):
            log(
                "warning",
                "{} ranks, but the model is neither wrapped in DDP nor sharded: each rank trains separately.",
                dist.get_world_size(),
            )

    def require_same_precision(self, chosen: str) -> None:
        """Raise if ranks on different devices chose different precisions."""
        if not self.several:
            return
        everyone: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(everyone, chosen, group=self.process_group)
        if len(set(everyone)) > 1:
            of_each = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(everyone))
            raise BadInput(
                f"Engine(precision='auto') chose different precisions: {of_each}. Name one that all ranks can run."
            )


def _average_(gradients: Sequence[Tensor], group: Any) -> None:
    """Average gradients over ranks in place, with one all-reduce per dtype."""
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _drop_kept_by(state: Any) -> None:
    """Clear the gradients that FSDP2 would add to its next exchange; torch has no public way."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for kept in (kept for group in groups if group is not None for kept in group.fsdp_params):
        kept.unsharded_accumulated_grad = None
        if hasattr(kept, "_unsharded_param"):
            kept._unsharded_param.grad = None
