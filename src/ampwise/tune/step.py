"""A training step by torch's own means, in any precision: what is compared, and whose memory is counted."""

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

from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import Precision, choose
from ampwise.errors import BadInput, UnknownName
from ampwise.tune.subject import Subject

__all__ = ["OPTIMIZERS", "TrainingStep", "make_optimizer"]

LR = 1e-5  # so little that a model goes on making sense while it is measured

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}


def make_optimizer(name: str, parameters: Iterable[Parameter], *, fused: bool) -> Optimizer:
    """An optimizer by its name."""
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS, listing=f"There are {', '.join(OPTIMIZERS)}.")
    trained = list(parameters)
    if not trained:
        raise BadInput("the model has no parameter that is trained: each has requires_grad=False.")
    return OPTIMIZERS[name](trained, lr=LR, fused=fused)


class TrainingStep:
    """Calling it trains a step: forward, backward, clip, optimizer, gradients dropped. It returns the loss.

    It is written with torch alone, as one would write it by hand: autocast, torch's GradScaler where the precision
    needs one, ``clip_grad_norm_``. Steps of several precisions may take turns on one model and one optimizer.
    """

    def __init__(
        self,
        subject: Subject,
        precision: str | Policy | Precision,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = 1.0,
        compiled: bool = False,
    ) -> None:
        policy = precision if isinstance(precision, Policy) else None
        base = precision if isinstance(precision, Precision) else choose(_base(precision), subject.device).precision
        self.subject, self.precision, self.optimizer, self.policy = subject, base, optimizer, policy
        self._policy_on = _taken_off(policy, subject)
        self._clip_norm = clip_norm
        self._parameters = subject.parameters
        self._arithmetic = Arithmetic(base, subject.device.type)
        loss_fn = torch.compile(_with_own_code(subject.loss_fn), dynamic=False) if compiled else subject.loss_fn
        self._loss = replace(subject, loss_fn=loss_fn).loss
        self._scaler: Any = torch.amp.GradScaler(subject.device.type, enabled=base.scaled)

    def __call__(self) -> Tensor:
        loss = self.forward_and_backward()
        self.update()
        return loss

    def in_place(self) -> AbstractContextManager[Any]:
        """Where the precision is a policy, it is on the model while inside; steps are to be called there."""
        return self._policy_on

    def forward_and_backward(self) -> Tensor:
        """The first half: gradients are there, still scaled."""
        with self._arithmetic.products():
            with self._arithmetic.forward():
                loss = self._loss()
            with self._arithmetic.backward():
                self._scaler.scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """The other half."""
        if self._clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _taken_off(policy: Policy | None, subject: Subject) -> AbstractContextManager[Any]:
    """The policy for this model, to be put on."""
    if policy is None:
        return nullcontext()
    with policy.apply(subject.model) as applied:
        return applied


def _with_own_code(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function by code of its own.

    Compiled versions are kept with the code, a few for each: those of several precisions and comparisons would soon be
    too many, and torch would go on without compiling.
    """

    def loss(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **kwargs)

    loss.__code__ = loss.__code__.replace()
    return loss


def _base(precision: str | Policy) -> str:
    return precision.base if isinstance(precision, Policy) else precision
