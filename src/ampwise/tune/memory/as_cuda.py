"""Make CPU tensors follow CUDA's paths through torch: its autocast, and operations that it composes differently.

Fake tensors on a CUDA device cannot be trained without a GPU, and a prediction should not depend on whether there is
one. So the tensors are fake ones on the CPU, and within ``as_cuda`` the dispatcher routes them like CUDA's. Where torch
composes an operation differently for CUDA than for a CPU, other tensors are saved for backward; each function here
follows torch's C++ for CUDA tensors. Only shapes and dtypes are worked out; nothing is computed.
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

from ampwise.tune.memory.attention import attention_on
from ampwise.tune.memory.autocast_ops import FP32, FP32_OUTPUT, LOWER, NORMS, PROMOTE
from ampwise.tune.memory.recurrent import cudnn_kernels

ATEN = torch.ops.aten
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
ONE_AT_A_TIME = threading.RLock()  # the dispatcher is global
Kernel = Callable[..., Any]


@contextmanager
def as_cuda(capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Treat CPU tensors as those of a GPU of that compute capability; None: as on Hopper.

    Only for fake tensors, as the kernels do not compute.
    """
    with ONE_AT_A_TIME, torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding kernels is intended here
            for name, kernel in _autocast_kernels():
                library.impl(name, kernel, "AutocastCPU")
            composed = COMPOSED | cudnn_kernels() | {"scaled_dot_product_attention": attention_on(capability)}
            for name, kernel in composed.items():
                library.impl(name, kernel, "AutogradCPU")
        yield


# --- autocast -----------------------------------------------------------------------------------------------------


def _autocast_kernels() -> Iterator[tuple[str, Kernel]]:
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    cache: WeakValueDictionary[tuple[int, torch.dtype], Tensor] = WeakValueDictionary()
    # Operations that both cast to the lower dtype stay as they are, with torch's own cache of cast weights.
    for name in sorted((LOWER & on_cuda) - on_cpu):
        yield name, partial(_cast_first, _operator(name), lambda _: partial(_lowered, cache))
    for name in sorted(FP32 & on_cuda):
        yield name, partial(_cast_first, _operator(name), lambda _: Tensor.float)
    for name in sorted(PROMOTE & on_cuda):
        yield name, partial(_cast_first, _operator(name), _to_widest)
    for name in sorted(FP32_OUTPUT & on_cuda):
        yield name, partial(_fp32_output, _operator(name), _operator(name))
    for name in sorted(on_cuda & {*NORMS}):
        yield name, partial(_fp32_output, _operator(name), _operator(NORMS[name]))
    for name in sorted(on_cpu - on_cuda):
        yield name, torch.library.fallthrough_kernel


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Kernel:
    operator, _, overload = name.partition(".")
    found: Kernel = getattr(getattr(ATEN, operator), overload or "default")
    return found


def _cast_first(
    operator: Kernel, cast_for: Callable[[Any], Callable[[Tensor], Tensor]], *args: Any, **given: Any
) -> Any:
    """Call the operator without autocast, its floating-point tensors cast as ``cast_for`` says for these arguments."""
    cast = cast_for((args, given))
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        args, given = tree_map(lambda leaf: cast(leaf) if _is_cast(leaf) else leaf, (args, given))
        return operator(*args, **given)


def _lowered(cache: WeakValueDictionary[tuple[int, torch.dtype], Tensor], tensor: Tensor) -> Tensor:
    """Cast to autocast's dtype. A weight's cast is cached while something holds it: the graph, to its last use."""
    dtype = torch.get_autocast_dtype("cpu")
    if not (tensor.is_leaf and tensor.requires_grad):
        return tensor.to(dtype)
    found = cache.get((id(tensor), dtype))
    if found is None:
        found = cache[id(tensor), dtype] = tensor.to(dtype)
    return found


def _to_widest(arguments: Any) -> Callable[[Tensor], Tensor]:
    dtypes = {leaf.dtype for leaf in tree_leaves(arguments) if _is_cast(leaf)}
    return partial(Tensor.to, dtype=torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu"))


def _fp32_output(operator: Kernel, typed: Kernel, *args: Any, **given: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        asked = given.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
        if asked or not _is_cast(args[0]):
            return operator(*args, **given)
        return typed(*args, **given | {"dtype": torch.float32})


def _is_cast(leaf: object) -> bool:
    """Whether autocast casts it: not integers, and not FP64."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


# --- operations that CUDA composes differently ---------------------------------------------------------------------


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Save a boolean mask, as CUDA's kernel does; on a CPU it has the input's dtype."""
    if p == 0 or not train or not input.numel():
        return input
    return torch.native_dropout(input, p, train)[0]


class FusedRmsNorm(torch.autograd.Function):
    """RMSNorm as one kernel, which saves its input and one number per row; a CPU composes it from five."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
        scale = input.new_empty((*input.shape[: input.dim() - dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(input, weight, scale)
        ctx.mark_non_differentiable(scale)
        return torch.empty_like(input), scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    return FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-any-return,no-untyped-call]


def _softmax_like(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cast from FP16 to FP32 inside the kernel; BF16 has no such kernel, so it is copied."""

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return kernel(input, dim, True)
        return kernel(input if dtype is None else input.to(dtype), dim, False)

    return softmax


# Operators with another path on CUDA, and that path.
COMPOSED: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "softmax.int": _softmax_like(ATEN._softmax.default),
    "log_softmax.int": _softmax_like(ATEN._log_softmax.default),
}
if hasattr(ATEN, "_fused_rms_norm"):  # without it, CUDA runs the same five kernels
    COMPOSED["_fused_rms_norm"] = rms_norm
