"""A scaler for loops that do not say when an iteration is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampwise.engine.scaling.scaler import GradScaler

__all__ = ["LateScaler"]


class LateScaler(GradScaler):
    """GradScaler whose update waits until the next iteration begins.

    Accelerate and Lightning update the scale after each optimizer's step. With two optimizers the first update makes
    the scaler forget that the second one's gradients are unscaled already, and may change the scale under them. Here
    all steps up to the next loss count as one iteration.
    """

    _due = False

    def update_later(self) -> None:
        """After each step: the update is done when the next loss is scaled, or an optimizer steps again."""
        self._due = True

    def settle(self) -> None:
        """Do the update that is due."""
        if self._due:
            self._due = False
            self.update()

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether its gradients have been divided by the scale, in this iteration."""
        return not self._begins_anew(optimizer) and self._stage(optimizer) is OptState.UNSCALED

    def clipped_by(self, norm: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """They were clipped together, in memory. A norm that is not finite spoils them all, those found good too."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        bad = (~torch.isfinite(whole.detach())).float()
        for optimizer in optimizers:
            look = self._entries.of(optimizer).look
            if look is not None:
                look.verdict = look.verdict.or_found([bad])

    def scale(self, outputs: Any) -> Any:
        self.settle()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        self._settle_for(optimizer)
        super().unscale_(optimizer)

    def clip_(self, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        for each in [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer):
            self._settle_for(each)
        return super().clip_(optimizer, max_norm, norm_type)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        self._settle_for(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def get_scale(self) -> float:
        self.settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """As always, after the update that is due."""
        self.settle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return super().__getstate__()

    def _begins_anew(self, optimizer: Optimizer) -> bool:
        return self._due and self._stage(optimizer) is OptState.STEPPED

    def _settle_for(self, optimizer: Optimizer) -> None:
        if self._begins_anew(optimizer):
            self.settle()
