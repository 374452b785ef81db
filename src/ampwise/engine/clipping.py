"""Judging the gradients of a step and clipping them, for all optimizers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ampwise.engine.scaling.gradients import clamp_, gradients_of
from ampwise.engine.scaling.scale import is_number
from ampwise.engine.scaling.scaler import GradScaler
from ampwise.engine.scaling.verdict import NO_CLIPPING
from ampwise.errors import BadInput

__all__ = ["Clipping"]


@dataclass(frozen=True, slots=True)
class Clipping:
    """By the norm of all gradients, by the value of each, or not at all."""

    norm: float | None = None
    value: float | None = None

    @classmethod
    def checked(cls, norm: Any, value: Any) -> Clipping:
        for name, limit in (("clip_norm", norm), ("clip_value", value)):
            if limit is not None and (not is_number(limit) or not limit > 0):
                raise BadInput(f"Engine({name}={limit!r}): a number above 0 is expected, or None for no clipping.")
        if norm is not None and value is not None:
            raise BadInput("Engine(clip_norm=..., clip_value=...): one of them is expected, not both.")
        return cls(norm, value)

    def __str__(self) -> str:
        if self.norm is not None:
            return f", clip_norm {self.norm:g}"
        return "" if self.value is None else f", clip_value {self.value:g}"

    def clip_(
        self, scaler: GradScaler, optimizers: Sequence[Optimizer], parameters: Callable[[], list[Parameter]]
    ) -> None:
        """Look at all gradients at once: they are applied together or not at all. Then clip them.

        On a CPU the arithmetic is that of ``clip_grad_norm_``, so that a loop written by hand has the same weights to
        the last bit. Elsewhere clipping is left to the optimizer's kernel, which spares two sweeps of the gradients.
        """
        if self.norm is None and self.value is None and not scaler._looks:
            return
        by_torch = self.norm is not None and _all_on_cpu(optimizers)
        scaler._judge(optimizers, NO_CLIPPING if self.norm is None or by_torch else self.norm)
        if self.value is None and not by_torch:
            return
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if self.norm is not None:
            clip_grad_norm_(parameters(), self.norm)  # of which the order decides on the last bit
            return
        assert self.value is not None
        for optimizer in optimizers:
            clamp_(gradients_of(optimizer).values, self.value)


def _all_on_cpu(optimizers: Sequence[Optimizer]) -> bool:
    """Plain tensors on a CPU: no shards, whose norm is one of all ranks, and none that torch has no norm of."""
    return all(
        type(parameter.grad) is Tensor
        and parameter.grad.device.type == "cpu"
        and parameter.grad.layout is torch.strided
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
