"""Inspect torch's objects without changing them and without a sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from ampwise.watch.tracked_objects import PRECISIONS, PROBES

__all__ = [
    "autocast_precision",
    "device_and_precision",
    "dtype_name",
    "eps_of",
    "first_parameter",
    "floats_in",
    "has_fsdp1",
    "ids_of_contents",
    "inner_model",
    "is_on_cpu",
    "is_plain_torch",
    "parameters_of",
    "precisions_of",
    "probe",
    "probed_parameters",
    "stage_of",
    "states_in",
    "tensors_in",
    "unwrapped",
]

MOST_PARTS = 200  # parts of a saved object that are inspected
DEEPEST = 8  # nesting depth in which tensors are looked for


def autocast_precision(device_type: str) -> str | None:
    """Return autocast's precision; None if it is off."""
    try:
        if not torch.is_autocast_enabled(device_type):
            return None
        return PRECISIONS.get(torch.get_autocast_dtype(device_type), "other")
    except RuntimeError:  # a device without autocast
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return a short name, such as "bf16", "fp8_e4m3fn" or "int64"."""
    return PRECISIONS.get(dtype) or str(dtype).removeprefix("torch.").replace("float8_", "fp8_")


def tensors_in(thing: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors in a module's inputs or outputs, or in an optimizer's state."""
    if isinstance(thing, Tensor):
        yield thing
    elif depth and isinstance(thing, dict | list | tuple):
        for each in list(thing.values() if isinstance(thing, dict) else thing):
            yield from tensors_in(each, depth - 1)


def floats_in(thing: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested lists, tuples and dicts."""
    return (tensor for tensor in tensors_in(thing) if tensor.is_floating_point())


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def stage_of(scaler: Any, optimizer: Any) -> OptState | None:
    states = getattr(scaler, "_per_optimizer_states", {})
    known = states.get(id(optimizer)) if hasattr(states, "get") else None
    return None if known is None else known["stage"]


def states_in(thing: Any, depth: int = 5) -> tuple[bool, bool]:
    """Return whether a saved object contains an optimizer's state, and whether it contains a scaler's."""
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


def device_and_precision(model: nn.Module) -> tuple[str, str]:
    """Return device and precision of a model that is about to run: autocast's, or that of its parameters."""
    first = first_parameter(model)
    if first is None:
        return "cpu", "fp32"
    return first.device.type, autocast_precision(first.device.type) or PRECISIONS.get(first.dtype, "other")


def first_parameter(model: nn.Module) -> Tensor | None:
    """Return the first floating-point parameter. Torch's own iterators, which build names, take much longer."""
    pending: list[nn.Module | None] = [model]
    seen: set[int] = set()  # by identity: a module may define __eq__
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in seen:  # modules may contain their parents
            seen.add(id(module))
            for each in module._parameters.values():
                if each is not None and each.is_floating_point():
                    return each
            pending += reversed(module._modules.values())
    return None


def ids_of_contents(model: nn.Module) -> tuple[set[int], set[int]]:
    """Ids of the parameters and of the modules of a model, much faster than by torch's own iterators."""
    parameters: set[int] = set()
    modules: set[int] = set()
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in modules:
            modules.add(id(module))
            parameters.update(map(id, module._parameters.values()))
            pending += module._modules.values()
    parameters.discard(id(None))
    return parameters, modules


def parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def is_on_cpu(optimizer: Any) -> bool:
    """Whether all parameters are on the CPU, where reading one needs no sync."""
    return all(each.device.type == "cpu" for group in optimizer.param_groups for each in group["params"])


def probed_parameters(optimizer: Any) -> list[Any]:
    """Return some of an optimizer's parameters: enough to see whether it has got gradients."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        params = group["params"]
        found += params if len(params) < 2 * PROBES else params[:: len(params) // PROBES]
    return found


def probe(parameters: Iterable[Any]) -> list[Any]:
    """Return what changes when the parameters get gradients: for each, the identity and version of its gradient."""
    return [None if (grad := each.grad) is None else (id(grad), grad._version) for each in parameters]


def precisions_of(optimizer: Any) -> tuple[str, ...]:
    dtypes = {each.dtype for group in optimizer.param_groups for each in group["params"]}
    return tuple(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))


def eps_of(optimizer: Any) -> float | None:
    eps = optimizer.param_groups[0].get("eps") if optimizer.param_groups else None
    return float(eps) if isinstance(eps, int | float) else None


def is_plain_torch(scaler: Any) -> bool:
    return type(scaler).__name__ != "ShardedGradScaler" and type(scaler).__module__.startswith("torch")


def has_fsdp1(optimizer: Any) -> bool:
    """Whether the optimizer has flat parameters, which only FSDP1 makes."""
    return any(
        type(each).__name__ == "FlatParameter" or hasattr(each, "_is_flat_param") or hasattr(each, "_fsdp_flattened")
        for group in optimizer.param_groups
        for each in group["params"][:PROBES]
    )


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
