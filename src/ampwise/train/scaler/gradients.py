"""An optimizer's gradients as dense local tensors, whatever kind of tensors they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
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
    seen: list[Tensor | None] = field(default_factory=list)  # ``.grad`` of every parameter
    versions: list[int] | None = field(default_factory=list)  # None: not known
    ordinary: bool = False  # all on one device, contiguous, and of a dtype that needs no conversion
    shards: dict[int, Any] = field(default_factory=dict)  # the DTensors among them, by position

    def __len__(self) -> int:
        return len(self.values)

    def belong_to(self, optimizer: Optimizer) -> bool:
        """Return whether no gradient was replaced, removed or added since these were collected."""
        now = _gradients_of(optimizer)
        return len(now) == len(self.seen) and all(map(is_, now, self.seen))

    def are_unchanged_in(self, optimizer: Optimizer) -> bool:
        """Return whether these are still the optimizer's gradients, and no torch operation changed them."""
        if self.versions is None or self.versions != versions_of(self.values):
            return False
        return self.belong_to(optimizer)

    def are_all_replaced_in(self, optimizer: Optimizer) -> bool:
        """Return whether all of them were replaced, as by zero_grad and another backward pass."""
        for now, before in zip(_gradients_of(optimizer), self.seen, strict=False):
            if now is before and before is not None:
                return False
        return True


def collect_gradients(optimizer: Optimizer) -> OptimizerGradients:
    """Collect an optimizer's gradients. This runs at every step: one loop, and no further calls for ordinary ones."""
    seen = _gradients_of(optimizer)
    values, devices, contiguous = [], set(), True
    for gradient in seen:
        if gradient is None:
            continue
        if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.dtype not in DTYPE_CODES:
            return _collect_unusual(optimizer)
        values.append(gradient)
        devices.add(gradient.get_device())
        contiguous = contiguous and gradient.is_contiguous()
    return OptimizerGradients(values, seen, versions_of(values), ordinary=len(devices) == 1 and contiguous)


def versions_of(values: Iterable[Tensor]) -> list[int] | None:
    """Return the tensors' version counters; None if one has none."""
    try:
        return list(map(attrgetter("_version"), values))
    except RuntimeError:  # tensors made in inference mode have none
        return None


def first_device(optimizers: Sequence[Optimizer]) -> torch.device:
    """Return the device of the first parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device  # type: ignore[no-any-return]
    return torch.device("cpu")


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


def _gradients_of(optimizer: Any) -> list[Tensor | None]:
    try:
        groups = optimizer.param_groups
    except AttributeError:
        raise BadInput(f"expected an optimizer; {type(optimizer).__name__} has no param_groups.") from None
    return [parameter.grad for group in groups for parameter in group["params"]]


def _collect_unusual(optimizer: Optimizer) -> OptimizerGradients:
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
