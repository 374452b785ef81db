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

WRAPPERS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}  # packages that hand out optimizers


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
        optimizer = _inner(optimizer)
        return not self._begins_anew(optimizer) and self._stage(optimizer) is OptState.UNSCALED

    def skipped_for(self, optimizer: Optimizer) -> bool:
        """As always; of the framework's wrapper too."""
        return super().skipped_for(_inner(optimizer))

    def clipped_by(self, norm: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """They were clipped together, in memory. A norm that is not finite spoils them all, those found good too."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        bad = (~torch.isfinite(whole.detach())).float()
        for optimizer in optimizers:
            look = self._entries.of(_inner(optimizer)).look
            if look is not None:
                look.verdict = look.verdict.or_found([bad])

    def look_again(self, optimizer: Optimizer) -> None:
        """Where nothing is scaled: more was added to gradients that were looked at, and is about to be clipped."""
        inner = _inner(optimizer)
        every = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
        self.clipped_by(torch.nn.utils.get_total_norm(every), [inner])

    def scale(self, outputs: Any) -> Any:
        self.settle()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        inner = _inner(optimizer)
        self._settle_for(inner)
        super().unscale_(inner)

    def clip_(self, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        every = [_inner(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else list(optimizer))]
        for each in every:
            self._settle_for(each)
        return super().clip_(every, max_norm, norm_type)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As always; of an optimizer that has stepped, this begins the next iteration."""
        inner = _inner(optimizer)
        self._settle_for(inner)
        return super().step(inner, *args, **kwargs)

    def get_scale(self) -> float:
        self._settle_if_over()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """As always, after the update that is due."""
        self._settle_if_over()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._settle_if_over()
        return super().__getstate__()

    def _settle_if_over(self) -> None:
        """For who only asks. Of an optimizer yet to step, the update would forget the unscaling and the clipping."""
        stepped = {id(entry) for entry in self._stepped}
        if not any(entry.look is not None and id(entry) not in stepped for entry in self._entries):
            self.settle()

    def _begins_anew(self, optimizer: Optimizer) -> bool:
        return self._due and self._stage(optimizer) is OptState.STEPPED

    def _settle_for(self, optimizer: Optimizer) -> None:
        if self._begins_anew(optimizer):
            self.settle()


def _inner(optimizer: Any) -> Any:
    """The one that steps: facts are kept by it, and loops are given the framework's wrapper around it."""
    while any(kind.__module__.partition(".")[0] in WRAPPERS for kind in type(optimizer).__mro__):
        if not hasattr(optimizer, "optimizer"):  # one of the package's own, and no wrapper
            break
        optimizer = optimizer.optimizer
    return optimizer
