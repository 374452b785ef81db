"""A training step in any precision, written with torch alone: the step that is compared and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ampwise.errors import BadInput, UnknownName
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import TrainPrecision, choose_precision
from ampwise.tune.train_case import TrainCase

__all__ = ["OPTIMIZERS", "TrainingStep", "make_optimizer"]

LR = 1e-5  # so small that the model stays sensible while it is measured

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}


def make_optimizer(name: str, parameters: Iterable[Parameter], *, fused: bool) -> Optimizer:
    """Make an optimizer by name."""
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS, listing=f"There are {', '.join(OPTIMIZERS)}.")
    trained = list(parameters)
    if not trained:
        raise BadInput("the model has no trainable parameter: each has requires_grad=False.")
    return OPTIMIZERS[name](trained, lr=LR, fused=fused)


class TrainingStep:
    """Train a step when called: forward, backward, clip, optimizer, clear gradients. Return the loss.

    It uses torch alone, as a plain training loop does: autocast, torch's GradScaler where the precision
    needs one, ``clip_grad_norm_``. Steps of several precisions may take turns on one model and one optimizer.
    """

    def __init__(
        self,
        case: TrainCase,
        precision: str | Policy | TrainPrecision,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = 1.0,
        compiled: bool = False,
    ) -> None:
        policy = precision if isinstance(precision, Policy) else None
        base = (
            precision
            if isinstance(precision, TrainPrecision)
            else choose_precision(_base(precision), case.device).precision
        )
        self.case, self.precision, self.optimizer, self.policy = case, base, optimizer, policy
        self._policy_applied = _policy_context(policy, case)
        self._clip_norm = clip_norm
        self._parameters = case.parameters
        self._arithmetic = PrecisionContexts(base, case.device.type)
        loss_fn = torch.compile(_copy_with_own_code(case.loss_fn), dynamic=False) if compiled else case.loss_fn
        self._loss = replace(case, loss_fn=loss_fn).loss
        self._scaler: Any = torch.amp.GradScaler(case.device.type, enabled=base.scaled)

    def __call__(self) -> Tensor:
        loss = self.forward_and_backward()
        self.update()
        return loss

    def in_place(self) -> AbstractContextManager[Any]:
        """Apply the precision's policy, if it has one, while inside; call steps there."""
        return self._policy_applied

    def forward_and_backward(self) -> Tensor:
        """Run forward and backward; gradients stay scaled."""
        with self._arithmetic.pass_context():
            with self._arithmetic.forward():
                loss = self._loss()
            with self._arithmetic.backward():
                self._scaler.scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """Unscale, clip, step the optimizer and clear gradients."""
        if self._clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _policy_context(policy: Policy | None, case: TrainCase) -> AbstractContextManager[Any]:
    """Return the policy's context for this model, not yet entered."""
    if policy is None:
        return nullcontext()
    with policy.apply(case.model) as applied:
        return applied


def _copy_with_own_code(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the function with its own code object.

    Compiled versions are cached per code object, a few for each: several precisions and comparisons would soon make
    too many, and torch would stop compiling.
    """

    def loss(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **kwargs)

    loss.__code__ = loss.__code__.replace()
    return loss


def _base(precision: str | Policy) -> str:
    return precision.base if isinstance(precision, Policy) else precision
