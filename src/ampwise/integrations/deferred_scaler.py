"""A GradScaler for training loops that do not tell when an iteration ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampwise.train.scaler.grad_scaler import GradScaler

__all__ = ["DeferredScaler", "inner_optimizer"]

WRAPPERS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}  # packages that hand out optimizers


class DeferredScaler(GradScaler):
    """GradScaler whose update is deferred until the next iteration begins.

    Accelerate and Lightning update the scale after each optimizer's step. With two optimizers, the first update makes
    the scaler forget that the second one's gradients are already unscaled, and may change the scale before they are
    applied. Here all steps up to the next loss count as one iteration.
    """

    _update_pending = False

    def update_later(self) -> None:
        """Request an update after a step; it is done when the next loss is scaled or an optimizer steps again."""
        self._update_pending = True

    def update_if_pending(self) -> None:
        """Do the deferred update, if there is one."""
        if self._update_pending:
            self._update_pending = False
            self.update()

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients were unscaled in this iteration."""
        optimizer = inner_optimizer(optimizer)
        return not self._begins_iteration(optimizer) and self._stage(self._entry(optimizer)) is OptState.UNSCALED

    def skipped_for(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last step was skipped; takes the framework's wrapper, too."""
        return super().skipped_for(inner_optimizer(optimizer))

    def clipped_by(self, norm: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Record the total norm of optimizers that were clipped together; if it is not finite, all are skipped."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        bad = (~torch.isfinite(whole.detach())).float()
        for optimizer in optimizers:
            checked = self._entry(inner_optimizer(optimizer)).checked
            if checked is not None:
                checked.decision = checked.decision.or_found([bad])

    def check_again(self, optimizer: Optimizer) -> None:
        """Check gradients that changed since the last check, before they are clipped; without a loss scale only."""
        inner = inner_optimizer(optimizer)
        every = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
        self.clipped_by(torch.nn.utils.get_total_norm(every), [inner])

    def scale(self, outputs: Any) -> Any:
        self.update_if_pending()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale gradients; for an optimizer that has already stepped, this begins the next iteration."""
        inner = inner_optimizer(optimizer)
        self._update_if_next_iteration(inner)
        super().unscale_(inner)

    def clip_(self, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients; for an optimizer that has already stepped, this begins the next iteration."""
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        every = [inner_optimizer(each) for each in given]
        for each in every:
            self._update_if_next_iteration(each)
        return super().clip_(every, max_norm, norm_type)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer; if it has already stepped, this begins the next iteration."""
        inner = inner_optimizer(optimizer)
        self._update_if_next_iteration(inner)
        return super().step(inner, *args, **kwargs)

    def get_scale(self) -> float:
        self._update_if_all_stepped()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after the deferred update."""
        self._update_if_all_stepped()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._update_if_all_stepped()
        return super().__getstate__()

    def _update_if_all_stepped(self) -> None:
        """Update unless an optimizer is still to step: the update would drop its unscaling and clipping."""
        stepped = {id(entry) for entry in self._stepped}
        if not any(entry.checked is not None and id(entry) not in stepped for entry in self._entries.values()):
            self.update_if_pending()

    def _begins_iteration(self, optimizer: Optimizer) -> bool:
        return self._update_pending and self._stage(self._entry(optimizer)) is OptState.STEPPED

    def _update_if_next_iteration(self, optimizer: Optimizer) -> None:
        if self._begins_iteration(optimizer):
            self.update_if_pending()


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the framework's wrapper: state is kept by the inner one."""
    while any(kind.__module__.partition(".")[0] in WRAPPERS for kind in type(optimizer).__mro__):
        if not hasattr(optimizer, "optimizer"):  # the package's own optimizer, not a wrapper
            break
        optimizer = optimizer.optimizer
    return optimizer
