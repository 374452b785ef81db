"""An optimizer takes its step, or leaves everything as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Optimizer

from ampwise.engine.scaling.adam import ours_within
from ampwise.engine.scaling.look import Look

__all__ = ["asks_for_the_scaler", "closes_over", "refuse_closure", "scales_by_itself", "take_step"]


def scales_by_itself(optimizer: Optimizer) -> bool:
    """A fused optimizer: it divides gradients and skips bad steps on the device.

    One of torch's that has loaded the state of one that was not fused goes on unfused, and still says that it is.
    """
    says_so = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return says_so and (not _is_torchs(optimizer) or all(group["fused"] for group in optimizer.param_groups))


def asks_for_the_scaler(optimizer: Optimizer) -> bool:
    """Of an older contract, in which the optimizer is handed the scaler."""
    if _is_torchs(optimizer):
        return False  # which spares the inspection: it takes longer than a launch
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def closes_over(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step is given a closure to compute gradients in."""
    return kwargs.get("closure") is not None or bool(args and callable(args[0]))


def refuse_closure(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A closure computes gradients inside of the step, where nobody unscales them."""
    words = "Closure use is not currently supported if GradScaler is enabled."
    if isinstance(optimizer, LBFGS):
        raise RuntimeError(f"{words} LBFGS needs one: train it in FP32 or BF16, with GradScaler(enabled=False).")
    if "closure" in kwargs or closes_over(args, kwargs):
        raise RuntimeError(f"{words} Compute the gradients before scaler.step(optimizer).")


def take_step(
    optimizer: Optimizer, look: Look, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool | None]:
    """What ``optimizer.step`` returned, and whether the step was skipped: None if only the device knows."""
    if not scales_by_itself(optimizer) or asks_for_the_scaler(optimizer):
        return _step_if_good(optimizer, look, lambda: _step_after_settling(optimizer, look, args, kwargs))
    if _has_no_momentum_yet(optimizer):
        return _step_if_good(optimizer, look, lambda: _step_on_device(optimizer, look, args, kwargs))
    return _step_on_device(optimizer, look, args, kwargs), None


def _step_on_device(optimizer: Any, look: Look, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The optimizer's kernel divides the gradients, and does nothing at all where found_inf is 1."""
    of_the_user = getattr(optimizer, "grad_scale", None)
    if not look.pending:
        optimizer.grad_scale = of_the_user
    else:
        grad_scale = look.verdict.grad_scale
        optimizer.grad_scale = grad_scale if of_the_user is None else grad_scale * of_the_user
    optimizer.found_inf = look.verdict.found_inf
    # Without clipping, the optimizer's own kernel gives what it gives under torch's scaler, bit for bit.
    faster = ours_within(optimizer, look) if look.clips and of_the_user is None else nullcontext()
    try:
        with faster:
            return optimizer.step(*args, **kwargs)
    finally:
        # Left there, they would act on the next step too.
        del optimizer.grad_scale, optimizer.found_inf


def _step_after_settling(optimizer: Any, look: Look, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    look.settle_()
    return optimizer.step(*args, **kwargs)


def _step_if_good(optimizer: Optimizer, look: Look, step: Callable[[], Any]) -> tuple[Any, bool]:
    """Ask the device and wait for the answer, as the optimizer itself cannot skip."""
    found_inf = look.verdict.found_inf
    if found_inf.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"GradScaler.step() in a CUDA graph needs an optimizer that skips on the device: "
            f"{type(optimizer).__name__}(..., fused=True, capturable=True), after a few steps outside of the graph."
        )
    if found_inf.item():
        return None, True
    return step(), False


def _has_no_momentum_yet(optimizer: Optimizer) -> bool:
    """The first step of fused SGD makes its buffers, and leaves them unwritten if the step is skipped."""
    if not isinstance(optimizer, SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            if first is not None and optimizer.state[first].get("momentum_buffer") is None:
                return True
    return False
