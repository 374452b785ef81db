"""Operations that torch composes differently for CUDA than for a CPU, so that other tensors are saved for backward.

Each follows torch's C++ for CUDA tensors: the fused kernels of attention, dropout's mask of one byte, and so on. Only
shapes and dtypes are worked out; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["COMPOSED"]

ATEN = torch.ops.aten
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256  # the widest head that the flash kernel takes
ALIGNED_BYTES = 16  # the memory-efficient kernel needs heads that are multiples of this


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that torch picks on a GPU with tensor cores: flash, else memory-efficient, else math."""
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if _flash(query, key, value, attn_mask):
        return ATEN._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if _efficient(query, value) and not grouped:
        trained = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return ATEN._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, _as_bias(attn_mask, query, key), trained, dropout_p, is_causal, scale=scale
        )[0]
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    return ATEN._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, **options
    )[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        mask is None
        and query.dim() == 4
        and query.dtype in SIXTEEN_BITS
        and query.shape[-1] == value.shape[-1] <= FLASH_HEAD
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _efficient(query: Tensor, value: Tensor) -> bool:
    aligned = all(each.shape[-1] * each.element_size() % ALIGNED_BYTES == 0 for each in (query, value))
    wide_enough = query.dtype in (*SIXTEEN_BITS, torch.float32)
    return query.dim() == 4 and aligned and wide_enough and torch.backends.cuda.mem_efficient_sdp_enabled()


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])


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
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "softmax.int": _softmax_like(ATEN._softmax.default),
    "log_softmax.int": _softmax_like(ATEN._log_softmax.default),
}
if hasattr(ATEN, "_fused_rms_norm"):  # without it, CUDA runs the same five kernels
    COMPOSED["_fused_rms_norm"] = rms_norm
