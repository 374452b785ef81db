"""Other kernels for a failed operation: if the step is finite with one of them, the kernel is at fault, not the model.

A library has several kernels for attention, convolutions and matmuls, and chooses one by shape, format and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ampwise.hardware.kernel_faults import faults_here
from ampwise.trace.failure import KERNEL, Failure
from ampwise.trace.failure_facts import FixTrial, Origin
from ampwise.trace.replay import Replay, ReplaySettings

__all__ = ["OtherKernel", "other_kernels", "try_other_kernels"]

ATTENTION = {
    "cudnn": ("cuDNN", "torch.backends.cuda.enable_cudnn_sdp(False)"),
    "flash": ("FlashAttention", "torch.backends.cuda.enable_flash_sdp(False)"),
    "efficient": ("memory-efficient attention", "torch.backends.cuda.enable_mem_efficient_sdp(False)"),
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MATH = "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):\n    y = F.scaled_dot_product_attention(q, k, v)"
MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class OtherKernel(NamedTuple):
    """Another way to run an operation."""

    what: str  # "attention without cuDNN"
    code: str  # the switch
    used: Callable[[], AbstractContextManager[Any]]


def other_kernels(origin: Origin, device: str) -> Iterator[OtherKernel]:
    """Yield other kernels for the operation, on the same device and in the same format."""
    name = origin.name
    if "scaled_dot_product" in name and "attention_math" not in name:
        chosen = next((each for each in ATTENTION if each in name), None) if device == "cuda" else None
        if chosen is not None:
            title, code = ATTENTION[chosen]
            others = [each for backend, each in BACKENDS.items() if backend != chosen]
            yield OtherKernel(f"attention without {title}", code, lambda: _Attention([*others, SDPBackend.MATH]))
        yield OtherKernel("attention by plain matmuls", MATH, lambda: _Attention([SDPBackend.MATH]))
    elif "conv" in name or "rnn" in name or "batch_norm" in name:
        if device == "cuda" and torch.backends.cudnn.enabled:
            off = "torch.backends.cudnn.enabled = False"
            yield OtherKernel("the step without cuDNN", off, lambda: torch.backends.cudnn.flags(enabled=False))
        elif device == "cpu" and torch.backends.mkldnn.is_available():
            off = "torch.backends.mkldnn.set_flags(False)"
            yield OtherKernel("the step without oneDNN", off, lambda: torch.backends.mkldnn.flags(enabled=False))
    elif name in MATMULS and device == "cuda":
        setting = "allow_fp16_reduced_precision_reduction"
        if origin.dtype == "fp16" and getattr(torch.backends.cuda.matmul, setting):
            code = f"torch.backends.cuda.matmul.{setting} = False"
            yield OtherKernel("matmuls that add up in FP32", code, lambda: _set(setting, False))
        other = "cublas" if "lt" in str(torch.backends.cuda.preferred_blas_library()).lower() else "cublaslt"
        code = f'torch.backends.cuda.preferred_blas_library("{other}")'
        yield OtherKernel(f"matmuls by {other}", code, lambda: _blas_library(other))


def try_other_kernels(replay: Replay, failure: Failure) -> tuple[FixTrial, ...]:
    """Return the trial of the first other kernel with which the step is finite, if there is one.

    Only for an operation whose inputs are finite, and whose exact result fits its format.
    """
    origin = failure.origin
    if origin is None or not origin.may_be_kernel_fault:
        return ()
    for other in other_kernels(origin, failure.device):
        try:
            with other.used():
                ended = replay.plain(ReplaySettings(only_if_finite=True))
        except Exception:  # no such kernel for these arguments, or it needs too much memory
            continue
        if ended.finite and not ended.vanished:
            known = _known_bug(origin)
            return (
                FixTrial(what=other.what, code=other.code, finite=True, change=KERNEL, argument=known, loss=ended.loss),
            )
    return ()


def _known_bug(origin: Origin) -> str:
    """Return the report of the bug that this is, if it is known."""
    sizes = {each.name: each.shape for each in origin.inputs}
    if "key" not in sizes:
        return ""
    about = [fault for fault in faults_here() if fault.is_about(origin.name)]
    return next((fault.link for fault in about if fault.matches(sizes["key"][-2], mask=True)), "")


class _Attention(TorchFunctionMode):
    """Function mode in which attention chooses among these backends, whatever the script says."""

    def __init__(self, backends: list[SDPBackend]) -> None:
        super().__init__()
        self._backends = backends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with sdpa_kernel(self._backends):
            return func(*args, **(kwargs or {}))


@contextmanager
def _set(setting: str, value: bool) -> Iterator[None]:
    before = getattr(torch.backends.cuda.matmul, setting)
    setattr(torch.backends.cuda.matmul, setting, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, setting, before)


@contextmanager
def _blas_library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
