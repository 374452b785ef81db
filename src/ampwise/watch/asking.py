"""What torch's objects say of themselves, asked without changing or waiting for anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from ampwise.watch.state import PRECISIONS, PROBES

__all__ = [
    "autocast_precision",
    "dtype_name",
    "eps_of",
    "first_parameter",
    "floats_in",
    "has_fsdp1",
    "inner_model",
    "is_plain_torch",
    "on_host",
    "parameters_of",
    "precisions_of",
    "probe",
    "runs_in",
    "stage_of",
    "states_in",
    "tensors_in",
    "unwrapped",
]

MOST_PARTS = 200  # of something that is saved, which are looked at
DEEPEST = 8  # lists in lists, in which tensors are looked for


def autocast_precision(device_type: str) -> str | None:
    """What autocast is set to, where it is on."""
    try:
        if not torch.is_autocast_enabled(device_type):
            return None
        return PRECISIONS.get(torch.get_autocast_dtype(device_type), "other")
    except RuntimeError:  # a device without autocast
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16", "fp8_e4m3fn", "int64"."""
    return PRECISIONS.get(dtype) or str(dtype).removeprefix("torch.").replace("float8_", "fp8_")


def tensors_in(thing: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """The tensors in what a module takes or gives, or an optimizer keeps."""
    if isinstance(thing, Tensor):
        yield thing
    elif depth and isinstance(thing, dict | list | tuple):
        for each in list(thing.values() if isinstance(thing, dict) else thing):
            yield from tensors_in(each, depth - 1)


def floats_in(thing: Any) -> Iterator[Tensor]:
    """Those of them that hold floating-point numbers."""
    return (tensor for tensor in tensors_in(thing) if tensor.is_floating_point())


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def stage_of(scaler: Any, optimizer: Any) -> OptState | None:
    states = getattr(scaler, "_per_optimizer_states", {})
    known = states.get(id(optimizer)) if hasattr(states, "get") else None
    return None if known is None else known["stage"]


def states_in(thing: Any, depth: int = 5) -> tuple[bool, bool]:
    """Whether an optimizer's state, and a scaler's, is among what is saved."""
    if isinstance(thing, Optimizer | GradScaler):
        return isinstance(thing, Optimizer), isinstance(thing, GradScaler)
    if isinstance(thing, dict):
        keys = {key for key in thing if isinstance(key, str)}
        if {"state", "param_groups"} <= keys or {"scale", "growth_factor", "growth_interval"} <= keys:
            return "param_groups" in keys, "growth_factor" in keys
    if not depth or not isinstance(thing, dict | list | tuple):
        return False, False
    parts = list(thing.values() if isinstance(thing, dict) else thing)[:MOST_PARTS]
    found = [states_in(part, depth - 1) for part in parts if not isinstance(part, Tensor)]
    return any(one for one, _ in found), any(other for _, other in found)


def runs_in(model: nn.Module) -> tuple[str, str]:
    """Device and precision of a model that is about to run: autocast's, else that of its parameters."""
    first = first_parameter(model)
    if first is None:
        return "cpu", "fp32"
    return first.device.type, autocast_precision(first.device.type) or PRECISIONS.get(first.dtype, "other")


def first_parameter(model: nn.Module) -> Tensor | None:
    """That holds floating-point numbers. By torch's own iterators, which name what they pass, it takes much longer."""
    pending: list[nn.Module | None] = [model]
    seen: set[int] = set()  # by identity: a module may have any notion of what it is equal to
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in seen:  # some have their parents among their parts
            seen.add(id(module))
            for each in module._parameters.values():
                if each is not None and each.is_floating_point():
                    return each
            pending += reversed(module._modules.values())
    return None


def parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def on_host(optimizer: Any) -> bool:
    """Whether all its parameters are in the host's memory, where looking at one waits for nothing."""
    return all(each.device.type == "cpu" for group in optimizer.param_groups for each in group["params"])


def probe(optimizer: Any) -> list[Any]:
    """What changes when some of its parameters get gradients."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        params = group["params"]
        for each in params[:: max(len(params) // PROBES, 1)]:
            grad = each.grad
            found.append(None if grad is None else (id(grad), grad._version))
    return found


def precisions_of(optimizer: Any) -> tuple[str, ...]:
    dtypes = {each.dtype for group in optimizer.param_groups for each in group["params"]}
    return tuple(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))


def eps_of(optimizer: Any) -> float | None:
    eps = optimizer.param_groups[0].get("eps") if optimizer.param_groups else None
    return float(eps) if isinstance(eps, int | float) else None


def is_plain_torch(scaler: Any) -> bool:
    return type(scaler).__name__ != "ShardedGradScaler" and type(scaler).__module__.startswith("torch")


def has_fsdp1(optimizer: Any) -> bool:
    """Flat parameters are FSDP1's own."""
    return any(
        type(each).__name__ == "FlatParameter" or hasattr(each, "_is_flat_param") or hasattr(each, "_fsdp_flattened")
        for group in optimizer.param_groups
        for each in group["params"][:PROBES]
    )


def inner_model(model: nn.Module) -> nn.Module:
    """The user's own, inside of what it was wrapped in."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
