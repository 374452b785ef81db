"""An optimizer's gradients as dense local tensors, whatever kind of tensors they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.numbers.census.flat_values import DTYPE_CODES

__all__ = [
    "OptimizerGradients",
    "clamp_",
    "collect_gradients",
    "first_device",
    "multiply_",
    "refuse_half",
    "to_device",
    "versions_of",
]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, asynchronously unless that is the host, which could read before the copy is done."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@dataclass(slots=True)
class OptimizerGradients:
    """Gradients of an optimizer's parameters, as tensors to read and to scale."""

    values: list[Tensor] = field(default_factory=list)  # dense and real; they share memory with ``.grad``
    shards: dict[int, Any] = field(default_factory=dict)  # the DTensors among them, by position
    ordinary: bool = False  # all on one device, contiguous, and of a dtype that needs no conversion
    seen: list[Tensor | None] = field(default_factory=list)  # ``.grad`` of every parameter
    versions: list[int] | None = field(default_factory=list)  # None: not known

    def __len__(self) -> int:
        return len(self.values)

    @property
    def devices(self) -> set[torch.device]:
        return {value.device for value in (self.values[:1] if self.ordinary else self.values)}

    def belong_to(self, optimizer: Optimizer) -> bool:
        """Return whether no gradient was replaced, removed or added since these were collected."""
        now = _all_of(optimizer)
        return len(now) == len(self.seen) and all(map(is_, now, self.seen))

    def record_versions(self) -> None:
        """Record the current version of each gradient."""
        self.versions = versions_of(self.values)

    def are_unchanged_in(self, optimizer: Optimizer) -> bool:
        """Return whether these are still the optimizer's gradients, and no torch operation changed them."""
        if self.versions is None:
            return False
        return self.belong_to(optimizer) and self.versions == versions_of(self.values)

    def are_all_replaced_in(self, optimizer: Optimizer) -> bool:
        """Return whether all of them were replaced, as by zero_grad and another backward pass."""
        now = _all_of(optimizer)
        return not any(one is other for one, other in zip(now, self.seen, strict=False) if other is not None)


def collect_gradients(optimizer: Optimizer) -> OptimizerGradients:
    """Collect an optimizer's gradients. This runs at every step, so ordinary ones are checked in bulk."""
    seen = _all_of(optimizer)
    present = [gradient for gradient in seen if gradient is not None]
    if not set(map(type, present)) <= {Tensor} or not _ordinary_kinds(present):
        return _unusual(optimizer)
    ordinary = (
        bool(present)
        and len({value.get_device() for value in present}) == 1
        and all(value.is_contiguous() for value in present)
    )
    return OptimizerGradients(present, ordinary=ordinary, seen=seen, versions=versions_of(present))


def first_device(optimizers: Sequence[Optimizer]) -> torch.device:
    """Return the device of the first parameter."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))


def refuse_half(gradients: OptimizerGradients) -> None:
    """Raise torch's error for FP16 gradients, which cannot be unscaled, with advice."""
    if any(value.dtype == torch.float16 for value in gradients.values):
        raise ValueError(
            "Attempting to unscale FP16 gradients. The parameters are FP16: keep them in FP32 and let autocast "
            "choose FP16 for each operation. (model.half() leaves nothing for a scaler to protect.)"
        )


@torch.no_grad()
def multiply_(values: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a number on the device."""
    for (device, _), alike in _by_kind(values).items():
        torch._foreach_mul_(alike, to_device(factor, device))


@torch.no_grad()
def clamp_(values: Iterable[Tensor], limit: float) -> None:
    """Clamp gradients to between -limit and limit, in place."""
    for alike in _by_kind(values).values():
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


def _by_kind(values: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        by_kind.setdefault((value.device, value.dtype), []).append(value)
    return by_kind


def versions_of(values: Iterable[Tensor]) -> list[int] | None:
    """Return the tensors' version counters; None if one has none."""
    try:
        return [value._version for value in values]
    except RuntimeError:  # tensors made in inference mode have none
        return None


def _all_of(optimizer: Any) -> list[Tensor | None]:
    try:
        groups = optimizer.param_groups
    except AttributeError:
        raise BadInput(f"expected an optimizer; {type(optimizer).__name__} has no param_groups.") from None
    return [parameter.grad for group in groups for parameter in group["params"]]


def _ordinary_kinds(gradients: list[Tensor]) -> bool:
    return {value.layout for value in gradients} <= {torch.strided} and {
        value.dtype for value in gradients
    } <= DTYPE_CODES.keys()


def _unusual(optimizer: Optimizer) -> OptimizerGradients:
    """Collect gradients one by one: some may be shards, sparse, complex, or of a dtype that needs conversion."""
    found = OptimizerGradients()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                if hasattr(parameter.grad, "placements"):
                    found.shards[len(found.values)] = _summed(parameter)
                found.values.append(_memory(parameter))
            found.seen.append(parameter.grad)
    found.versions = versions_of(found.values)
    return found


def _summed(parameter: Any) -> Any:
    """Return a DTensor gradient with partial placements summed over ranks; sequence parallelism leaves such."""
    gradient = parameter.grad
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        parameter.grad = gradient = gradient.redistribute(placements=placements)
    return gradient


def _memory(parameter: Any) -> Tensor:
    """Return an unusual gradient as a dense real tensor: a local shard, sparse values, real and imaginary parts."""
    gradient = parameter.grad
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            # Duplicates add up, which may overflow; optimizers coalesce anyway.
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient._values()
    if gradient.is_complex():
        if gradient.is_conj():
            parameter.grad = gradient = gradient.resolve_conj()
        gradient = torch.view_as_real(gradient)
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if hasattr(gradient, "trigger_wait"):
        gradient = gradient.trigger_wait()
    memory: Tensor = gradient.detach()
    return memory
