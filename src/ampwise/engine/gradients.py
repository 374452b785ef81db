"""An optimizer's gradients as memory on this process, whatever kind of tensors they come in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.census.flat import KINDS
from ampwise.errors import BadInput

__all__ = ["Gradients", "gradients_of", "multiply_"]


@dataclass(slots=True)
class Gradients:
    """What is there to read and to scale: one entry for each parameter that has a gradient."""

    places: list[tuple[int, int]] = field(default_factory=list)  # group, index in the group
    values: list[Tensor] = field(default_factory=list)  # dense and real; they share memory with ``.grad``
    shards: dict[int, Any] = field(default_factory=dict)  # the DTensors among them, by position

    def __len__(self) -> int:
        return len(self.values)

    @property
    def stamp(self) -> list[tuple[int, int]]:
        """Differs once a gradient was replaced or changed by a torch operation."""
        return [(value.data_ptr(), value._version) for value in self.values]


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Collect them. It runs at every step over every parameter: ordinary ones take the quick way."""
    found = Gradients()
    places, values = found.places, found.values
    for group_index, group in enumerate(_groups(optimizer)):
        for index, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            places.append((group_index, index))
            if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.dtype in KINDS:
                values.append(gradient)
                continue
            if hasattr(gradient, "placements"):
                found.shards[len(values)] = gradient
            values.append(_memory(parameter))
    return found


def multiply_(values: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a number on the device, with the operation that torch's scaler unscales by."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        by_kind.setdefault((value.device, value.dtype), []).append(value)
    for (device, _), alike in by_kind.items():
        ignored = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, ignored, factor.to(device, non_blocking=True))


def _groups(optimizer: Any) -> Any:
    try:
        return optimizer.param_groups
    except AttributeError:
        raise BadInput(f"an optimizer is expected; {type(optimizer).__name__} has no param_groups.") from None


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
    return gradient.detach()  # type: ignore[no-any-return]
