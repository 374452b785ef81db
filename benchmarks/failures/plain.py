"""A training loop by hand, as tutorials show it: the truth about a program, and the ground others stand on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.failures.case import Case

__all__ = ["Seen", "autocast", "first_bad", "quiet", "train", "where"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Seen:
    """Of one micro-batch: its place, its loss, and the parameters whose gradient is not finite after it."""

    index: int
    loss: float
    bad_gradients: tuple[str, ...]
    scale: float

    @property
    def loss_is_finite(self) -> bool:
        return abs(self.loss) < float("inf")  # False for NaN

    @property
    def is_finite(self) -> bool:
        return self.loss_is_finite and not self.bad_gradients


def where(case: Case) -> str:
    """The kind of device it is on."""
    return next(case.model.parameters()).device.type


def autocast(case: Case) -> AbstractContextManager[object]:
    dtype = DTYPES.get(case.precision)
    return nullcontext() if dtype is None else torch.autocast(where(case), dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns of some of the very things the programs do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(
    case: Case,
    scaler: torch.amp.GradScaler | None = None,
    around: Callable[[], AbstractContextManager[object]] = quiet,
) -> Iterator[Seen]:
    """A step for each batch; one that is not finite is skipped, as a scaler would. Without a scaler, at scale 1.

    Forward and backward passes are run within ``around()``.
    """
    window = case.options.get("accumulate", 1)
    scale = scaler.scale if scaler is not None else _unscaled
    for index, batch in enumerate(case.batches):
        with around():
            with autocast(case):
                loss = case.loss_fn(*batch)
            scale(loss / window).backward()
        at = scaler.get_scale() if scaler is not None else 1.0
        yield Seen(index, loss.item(), _bad_gradients(case), at)
        if (index + 1) % window == 0:
            _apply(case, scaler)
            case.optimizer.zero_grad()


def first_bad(case: Case) -> Seen | None:
    """The first micro-batch at which loss or gradients are not finite, at scale 1."""
    return next((seen for seen in train(case) if not seen.is_finite), None)


def _apply(case: Case, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None:
        scaler.unscale_(case.optimizer)
    if _bad_gradients(case) and scaler is None:
        return
    if (norm := case.options.get("clip_norm")) is not None:
        clip_grad_norm_(case.model.parameters(), norm)
    with quiet():
        step: Callable[[], object] = case.optimizer.step if scaler is None else lambda: scaler.step(case.optimizer)
        step()
    if scaler is not None:
        scaler.update()


def _unscaled(loss: Tensor) -> Tensor:
    return loss


def _bad_gradients(case: Case) -> tuple[str, ...]:
    grads = {name: parameter.grad for name, parameter in case.model.named_parameters() if parameter.grad is not None}
    return tuple(name for name, grad in grads.items() if not grad.to_dense().isfinite().all())
