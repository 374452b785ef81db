"""Run an optimizer's step, or skip it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Optimizer

from ampwise.train.scaler.adam import use_adam_kernel
from ampwise.train.scaler.checked_gradients import CheckedGradients

__all__ = ["has_closure", "refuse_closure", "supports_amp_scaling", "take_step", "takes_grad_scaler"]


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Return whether this is a fused optimizer, which unscales gradients and skips bad steps on the device.

    A torch optimizer that loaded an unfused one's state runs unfused, although its flag still says fused.
    """
    says_so = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return says_so and (not _is_torchs(optimizer) or all(group["fused"] for group in optimizer.param_groups))


def takes_grad_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` takes a ``grad_scaler``, torch's older protocol."""
    if _is_torchs(optimizer):
        return False  # without inspect.signature, which takes longer than a launch
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments of ``optimizer.step`` include a closure."""
    return kwargs.get("closure") is not None or bool(args and callable(args[0]))


def refuse_closure(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for a closure: its gradients are computed inside the step, where they cannot be unscaled."""
    words = "Closure use is not currently supported if GradScaler is enabled."
    if isinstance(optimizer, LBFGS):
        raise RuntimeError(f"{words} LBFGS needs one: train in FP32 or BF16, with GradScaler(enabled=False).")
    if "closure" in kwargs or has_closure(args, kwargs):
        raise RuntimeError(f"{words} Compute the gradients before scaler.step(optimizer).")


def take_step(
    optimizer: Optimizer, checked: CheckedGradients, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool | None]:
    """Return what ``optimizer.step`` returned, and whether the step was skipped: None if only the device knows."""
    if not supports_amp_scaling(optimizer) or takes_grad_scaler(optimizer):
        return _step_if_good(optimizer, checked, lambda: _step_after_settling(optimizer, checked, args, kwargs))
    if _has_no_momentum_yet(optimizer):
        return _step_if_good(optimizer, checked, lambda: _step_on_device(optimizer, checked, args, kwargs))
    return _step_on_device(optimizer, checked, args, kwargs), None


def _step_on_device(optimizer: Any, checked: CheckedGradients, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Step a fused optimizer: its kernel divides the gradients, and does nothing if found_inf is 1."""
    of_the_user = getattr(optimizer, "grad_scale", None)
    if not checked.pending:
        optimizer.grad_scale = of_the_user
    else:
        grad_scale = checked.decision.grad_scale
        optimizer.grad_scale = grad_scale if of_the_user is None else grad_scale * of_the_user
    optimizer.found_inf = checked.decision.found_inf
    # Without clipping, the optimizer's own kernel gives what it gives under torch's scaler, bit for bit.
    faster = use_adam_kernel(optimizer, checked) if checked.clips and of_the_user is None else nullcontext()
    try:
        with faster:
            return optimizer.step(*args, **kwargs)
    finally:
        # Else they would affect the next step too.
        del optimizer.grad_scale, optimizer.found_inf


def _step_after_settling(
    optimizer: Any, checked: CheckedGradients, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    checked.unscale_and_clip_()
    return optimizer.step(*args, **kwargs)


def _step_if_good(optimizer: Optimizer, checked: CheckedGradients, step: Callable[[], Any]) -> tuple[Any, bool]:
    """Sync with the device and skip on the host, as the optimizer itself cannot skip."""
    found_inf = checked.decision.found_inf
    if found_inf.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"GradScaler.step() in a CUDA graph needs an optimizer that skips on the device: "
            f"{type(optimizer).__name__}(..., fused=True, capturable=True), after a few steps outside the graph."
        )
    if found_inf.item():
        return None, True
    return step(), False


def _has_no_momentum_yet(optimizer: Optimizer) -> bool:
    """Return whether fused SGD would create momentum buffers, which stay uninitialised if that step is skipped."""
    if not isinstance(optimizer, SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            if first is not None and optimizer.state[first].get("momentum_buffer") is None:
                return True
    return False
