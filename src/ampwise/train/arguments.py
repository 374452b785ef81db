"""Check the arguments of an engine, with errors that say what to pass instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from ampwise.errors import BadInput
from ampwise.train.callback import Callback
from ampwise.train.scaler.loss_scale import is_number

__all__ = [
    "checked_callbacks",
    "checked_clipping",
    "checked_loss",
    "checked_models",
    "checked_optimizers",
    "checked_size",
    "checked_weight",
    "loss_and_extra",
    "model_device",
]


def checked_models(given: Any, asked: str = "Engine") -> list[Module]:
    """Return the models to train together, from one or a list."""
    models = list(given) if isinstance(given, list | tuple) else [given]
    if not models or not all(isinstance(model, Module) for model in models):
        wrong = next((type(model).__name__ for model in models if not isinstance(model, Module)), "nothing")
        raise BadInput(f"{asked}(model=...): expected a torch.nn.Module or a list of them, got {wrong}.")
    if not any(parameter.requires_grad for model in models for parameter in model.parameters()):
        raise BadInput(f"{asked}(model=...): no parameter requires a gradient, so there is nothing to train.")
    return models


def checked_optimizers(given: Any, models: Sequence[Module], asked: str = "Engine") -> list[Optimizer]:
    """Return the optimizers, from one or several; raise if they hold parameters of no model."""
    if isinstance(given, str):
        raise BadInput(
            f"{asked}(optimizer={given!r}): expected an optimizer. Make one by name: "
            f"ampwise.make_optimizer({given!r}, model, lr=3e-4)."
        )
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    if not optimizers:
        raise BadInput(f"{asked}(optimizer=[]): expected at least one optimizer.")
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise BadInput(
                f"{asked}(optimizer=LBFGS): it computes gradients in a closure, several times a step, which an engine "
                "cannot scale or check. Use another optimizer, or write the FP32 training loop yourself."
            )
        if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
            raise BadInput(f"{asked}(optimizer=...): expected an optimizer, got {type(optimizer).__name__}.")
    known = {id(parameter) for model in models for parameter in model.parameters()}
    held = [id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    strangers = sum(each not in known for each in held)
    if strangers:
        raise BadInput(
            f"{asked}(optimizer=...): {strangers} of its {len(held)} parameters do not belong to the model. Create the "
            "optimizer after the model is moved, sharded or wrapped; if the loss has parameters too, pass both: "
            f"{asked}(model=[model, criterion], optimizer=...)."
        )
    twice = sum(count > 1 for count in Counter(held).values())
    if twice:
        raise BadInput(
            f"{asked}(optimizer=[...]): {twice} parameters are in two optimizers or groups, and would be updated twice "
            "per step."
        )
    return optimizers


def checked_clipping(norm: Any, value: Any, asked: str = "Engine") -> tuple[float | None, float | None]:
    for name, limit in (("clip_norm", norm), ("clip_value", value)):
        if limit is not None and (not is_number(limit) or not limit > 0):
            raise BadInput(f"{asked}({name}={limit!r}): expected a number above 0, or None for no clipping.")
    if norm is not None and value is not None:
        raise BadInput(f"{asked}(clip_norm=..., clip_value=...): use one of them, not both.")
    return norm, value


def checked_size(accumulate: Any, asked: str = "Engine") -> int:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise BadInput(f"{asked}(accumulate={accumulate!r}): expected the number of micro-batches per step, 1 or more.")
    return accumulate


def checked_callbacks(given: Any) -> list[Callback]:
    callbacks = list(given) if isinstance(given, list | tuple) else [given]
    for each in callbacks:
        if not isinstance(each, Callback):
            hint = " For a sink: callbacks=[ampwise.Sinks(...)]." if isinstance(each, str) or callable(each) else ""
            raise BadInput(f"Engine(callbacks=[{each!r}]): expected a list of ampwise.Callback.{hint}")
    return callbacks


def checked_weight(weight: Any) -> Any:
    if weight is not None and not callable(weight):
        raise BadInput(
            f"Engine(weight={weight!r}): expected a function of the loss function's arguments, such as "
            "lambda x, y: (y != padding).sum()."
        )
    return weight


def model_device(models: Sequence[Module]) -> torch.device:
    """Return the device the models are on: the first that is not the CPU, if there are several."""
    devices = {parameter.device: None for model in models for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise BadInput("Engine(model=...): its parameters are on the meta device, without values. Initialise it first.")
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def loss_and_extra(returned: Any) -> tuple[Tensor, Any]:
    """Split what a loss function returned into the loss and the values after it, if any."""
    loss, extra = returned, None
    if isinstance(returned, tuple | list) and returned:
        loss, *rest = returned
        extra = tuple(rest) if len(rest) > 1 else rest[0] if rest else None
    return checked_loss(loss, "the loss function returned"), extra


def checked_loss(loss: Any, got: str) -> Tensor:
    """Return the loss, or raise if it is not a single number with a gradient."""
    if loss is None:
        raise BadInput(f"{got} None. Is a `return loss` missing?")
    if not isinstance(loss, Tensor):
        hint = ""
        if isinstance(loss, Mapping) and "loss" in loss:
            hint = " Return its 'loss'."
        elif isinstance(getattr(loss, "loss", None), Tensor):
            hint = " Return its .loss."
        elif isinstance(loss, int | float):
            hint = " Remove .item() or float()."
        raise BadInput(f"{got} {type(loss).__name__}; expected the loss as a tensor.{hint}")
    if loss.numel() != 1:
        raise BadInput(
            f"{got} a tensor of shape {tuple(loss.shape)}; expected the loss, a single number, as the first value. "
            "If these are losses, take their mean: loss.mean()."
        )
    if not torch.is_grad_enabled():
        raise BadInput("gradients are disabled here by torch.no_grad() or inference_mode(). Enable them for training.")
    if not loss.requires_grad:
        raise BadInput(
            f"{got} a loss that does not require a gradient. Was it detached, computed under torch.no_grad(), or "
            "converted by .item()?"
        )
    return loss
