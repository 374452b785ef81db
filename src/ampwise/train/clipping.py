"""Check the gradients of a step and clip them, for all optimizers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.scaler.grad_scaler import GradScaler
from ampwise.train.scaler.gradients import clamp_, collect_gradients
from ampwise.train.scaler.loss_scale import is_number
from ampwise.train.scaler.step_decision import NO_CLIPPING

__all__ = ["GradClipping"]


@dataclass(frozen=True, slots=True)
class GradClipping:
    """Clipping by the norm of all gradients, by the value of each, or none."""

    norm: float | None = None
    value: float | None = None

    @classmethod
    def checked(cls, norm: Any, value: Any) -> GradClipping:
        for name, limit in (("clip_norm", norm), ("clip_value", value)):
            if limit is not None and (not is_number(limit) or not limit > 0):
                raise BadInput(f"Engine({name}={limit!r}): expected a number above 0, or None for no clipping.")
        if norm is not None and value is not None:
            raise BadInput("Engine(clip_norm=..., clip_value=...): use one of them, not both.")
        return cls(norm, value)

    def __str__(self) -> str:
        if self.norm is not None:
            return f", clip_norm {self.norm:g}"
        return "" if self.value is None else f", clip_value {self.value:g}"

    def clip_(
        self, scaler: GradScaler, optimizers: Sequence[Optimizer], parameters: Callable[[], list[Parameter]]
    ) -> None:
        """Check all gradients together, as they are applied together or not at all; then clip them.

        On a CPU this calls ``clip_grad_norm_``, so that a plain PyTorch loop gives bit-identical weights. On other
        devices the optimizer's kernel clips, which saves two passes over the gradients.
        """
        if self.norm is None and self.value is None and not scaler._checks_gradients:
            return
        by_torch = self.norm is not None and _all_on_cpu(optimizers)
        scaler._check_all(optimizers, NO_CLIPPING if self.norm is None or by_torch else self.norm)
        if self.value is None and not by_torch:
            return
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if self.norm is not None:
            clip_grad_norm_(parameters(), self.norm)  # the order of parameters affects the last bit
            return
        assert self.value is not None
        for optimizer in optimizers:
            clamp_(collect_gradients(optimizer).values, self.value)


def _all_on_cpu(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether all gradients are plain dense CPU tensors: not DTensors, whose norm spans ranks, nor sparse."""
    return all(
        type(parameter.grad) is Tensor
        and parameter.grad.device.type == "cpu"
        and parameter.grad.layout is torch.strided
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
