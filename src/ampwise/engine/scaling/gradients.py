"""An optimizer's gradients as memory on this process, whatever kind of tensors they come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.census.flat import KINDS
from ampwise.errors import BadInput

__all__ = ["Gradients", "clamp_", "gradients_of", "home_of", "multiply_", "refuse_half", "there", "versions_of"]


def there(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting where that is safe: the host would read a copy before it has arrived."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@dataclass(slots=True)
class Gradients:
    """What is there to read and to scale: one entry for each parameter that has a gradient."""

    values: list[Tensor] = field(default_factory=list)  # dense and real; they share memory with ``.grad``
    shards: dict[int, Any] = field(default_factory=dict)  # the DTensors among them, by position
    ordinary: bool = False  # all on one device, contiguous, of a dtype that is read as it is
    seen: list[Tensor | None] = field(default_factory=list)  # ``.grad`` of every parameter
    versions: list[int] | None = field(default_factory=list)  # None: not known

    def __len__(self) -> int:
        return len(self.values)

    @property
    def devices(self) -> set[torch.device]:
        return {value.device for value in (self.values[:1] if self.ordinary else self.values)}

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Whether no gradient was replaced, removed or added since these were collected."""
        now = _all_of(optimizer)
        return len(now) == len(self.seen) and all(map(is_, now, self.seen))

    def take_stock(self) -> None:
        """Take the values as they are now for those that were collected."""
        self.versions = versions_of(self.values)

    def still_of(self, optimizer: Optimizer) -> bool:
        """Whether, besides, none was changed by a torch operation."""
        if self.versions is None:
            return False
        return self.are_those_of(optimizer) and self.versions == versions_of(self.values)

    def are_gone_from(self, optimizer: Optimizer) -> bool:
        """Whether all of them were replaced: another backward pass, after zero_grad."""
        now = _all_of(optimizer)
        return not any(one is other for one, other in zip(now, self.seen, strict=False) if other is not None)


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Collect them. It runs at every step over every parameter, so ordinary ones are looked at in bulk."""
    seen = _all_of(optimizer)
    present = [gradient for gradient in seen if gradient is not None]
    if not set(map(type, present)) <= {Tensor} or not _ordinary_kinds(present):
        return _unusual(optimizer)
    ordinary = (
        bool(present)
        and len({value.get_device() for value in present}) == 1
        and all(value.is_contiguous() for value in present)
    )
    return Gradients(present, ordinary=ordinary, seen=seen, versions=versions_of(present))


def home_of(optimizers: Sequence[Optimizer]) -> torch.device:
    """Where the parameters are, or the first of them."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))


def refuse_half(gradients: Gradients) -> None:
    """FP16 cannot hold unscaled gradients: torch's words, and the way out."""
    if any(value.dtype == torch.float16 for value in gradients.values):
        raise ValueError(
            "Attempting to unscale FP16 gradients. The parameters are FP16: keep them in FP32 and let autocast "
            "choose FP16 for each operation. (model.half() leaves nothing for a scaler to protect.)"
        )


@torch.no_grad()
def multiply_(values: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a number on the device."""
    for (device, _), alike in _by_kind(values).items():
        torch._foreach_mul_(alike, there(factor, device))


@torch.no_grad()
def clamp_(values: Iterable[Tensor], limit: float) -> None:
    """Bring gradients between minus and plus the limit, in place."""
    for alike in _by_kind(values).values():
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


def _by_kind(values: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        by_kind.setdefault((value.device, value.dtype), []).append(value)
    return by_kind


def versions_of(values: Iterable[Tensor]) -> list[int] | None:
    """What torch counts the changes of tensors by; None where it does not."""
    try:
        return [value._version for value in values]
    except RuntimeError:  # tensors made in inference mode have none
        return None


def _all_of(optimizer: Any) -> list[Tensor | None]:
    try:
        groups = optimizer.param_groups
    except AttributeError:
        raise BadInput(f"an optimizer is expected; {type(optimizer).__name__} has no param_groups.") from None
    return [parameter.grad for group in groups for parameter in group["params"]]


def _ordinary_kinds(gradients: list[Tensor]) -> bool:
    return {value.layout for value in gradients} <= {torch.strided} and {
        value.dtype for value in gradients
    } <= KINDS.keys()


def _unusual(optimizer: Optimizer) -> Gradients:
    """One by one: some may be shards, sparse, complex, or of a dtype that has to be converted."""
    found = Gradients()
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
    """A DTensor gradient that holds values: terms of a sum over ranks, as sequence parallelism leaves, are summed."""
    gradient = parameter.grad
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        parameter.grad = gradient = gradient.redistribute(placements=placements)
    return gradient


def _memory(parameter: Any) -> Tensor:
    """The numbers of an unusual gradient: a shard, sparse values, real and imaginary parts."""
    gradient = parameter.grad
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            # Duplicates add up, and may overflow only then; optimizers coalesce anyway.
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
