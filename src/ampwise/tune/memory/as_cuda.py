"""Make CPU tensors follow CUDA's paths through torch: its autocast, and operations that it composes differently.

Fake tensors on a CUDA device cannot be trained without a GPU, and a prediction should not depend on whether there is
one. So the tensors are fake ones on the CPU, and within ``as_cuda`` the dispatcher routes them like CUDA's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ampwise.tune.memory.autocast_ops import FP32, FP32_OUTPUT, LOWER, NORMS, PROMOTE
from ampwise.tune.memory.cuda_paths import COMPOSED

__all__ = ["as_cuda"]

ATEN = torch.ops.aten
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
ONE_AT_A_TIME = threading.RLock()  # the dispatcher is global
Kernel = Callable[..., Any]
Cache = WeakValueDictionary[tuple[int, torch.dtype], Tensor]


@contextmanager
def as_cuda() -> Iterator[None]:
    """Treat CPU tensors as CUDA's; only for fake tensors, as the kernels do not compute."""
    with ONE_AT_A_TIME, torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding kernels is intended here
            for name, kernel in _autocast_kernels():
                library.impl(name, kernel, "AutocastCPU")
            for name, kernel in COMPOSED.items():
                library.impl(name, kernel, "AutogradCPU")
        yield


def _autocast_kernels() -> Iterator[tuple[str, Kernel]]:
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    cache: Cache = WeakValueDictionary()
    # Operations that both cast to the lower dtype stay as they are, with torch's own cache of cast weights.
    for name in sorted((LOWER & on_cuda) - on_cpu):
        yield name, partial(_lower, _operator(name), cache)
    for name in sorted(FP32 & on_cuda):
        yield name, partial(_fp32, _operator(name))
    for name in sorted(FP32_OUTPUT & on_cuda):
        yield name, partial(_fp32_output, _operator(name), _operator(name))
    for name in sorted(on_cuda & {*NORMS}):
        yield name, partial(_fp32_output, _operator(name), _operator(NORMS[name]))
    for name in sorted(PROMOTE & on_cuda):
        yield name, partial(_promote, _operator(name))
    for name in sorted(on_cpu - on_cuda):
        yield name, torch.library.fallthrough_kernel


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Kernel:
    operator, _, overload = name.partition(".")
    found: Kernel = getattr(getattr(ATEN, operator), overload or "default")
    return found


def _lower(operator: Kernel, cache: Cache, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    with _no_autocast():
        cast = partial(_cached, cache, dtype)
        return operator(*_cast(cast, args), **_cast(cast, kwargs))


def _fp32(operator: Kernel, *args: Any, **kwargs: Any) -> Any:
    with _no_autocast():
        return operator(*_cast(Tensor.float, args), **_cast(Tensor.float, kwargs))


def _fp32_output(operator: Kernel, typed: Kernel, *args: Any, **kwargs: Any) -> Any:
    with _no_autocast():
        asked = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
        if asked or not _is_cast(args[0]):
            return operator(*args, **kwargs)
        return typed(*args, **kwargs | {"dtype": torch.float32})


def _promote(operator: Kernel, *args: Any, **kwargs: Any) -> Any:
    dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if _is_cast(value)}
    widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
    with _no_autocast():
        cast = partial(Tensor.to, dtype=widest)
        return operator(*_cast(cast, args), **_cast(cast, kwargs))


def _cached(cache: Cache, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the cast of a weight, cached while something holds it: the graph does, from first to last use."""
    if not (tensor.is_leaf and tensor.requires_grad):
        return tensor.to(dtype)
    found = cache.get((id(tensor), dtype))
    if found is None:
        found = cache[id(tensor), dtype] = tensor.to(dtype)
    return found


def _cast(cast: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map(lambda leaf: cast(leaf) if _is_cast(leaf) else leaf, tree)


def _is_cast(leaf: object) -> bool:
    """Whether autocast casts it: not integers, and not FP64."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _no_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(AUTOCAST)
