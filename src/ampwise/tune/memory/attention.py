"""The kernel that torch picks for ``scaled_dot_product_attention`` on a GPU, which decides what is saved for backward.

The conditions are those of torch's ``sdp_utils.cpp``, in the order in which it tries the kernels. Fused ones save one
number for each row; the math path, which remains, saves the matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
CUDNN_HEAD = FLASH_HEAD = 256  # the widest heads that the kernels take
HEAD_STEP = 8  # cuDNN takes heads that are multiples of this; flash pads to them
ALIGNED_BYTES = 16  # the memory-efficient kernel needs heads that are multiples of this
BIAS_STEP = 8  # and a bias padded to a multiple of this
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # Hopper and Blackwell, with the cuDNN 9.15.1 that comes with torch 2.11


class AttentionKernel(Enum):
    CUDNN = auto()
    FLASH = auto()
    EFFICIENT = auto()
    MATH = auto()


def prefers_cudnn(capability: tuple[int, int] | None) -> bool:
    """Whether torch tries cuDNN's attention first; for an unknown GPU, as on Hopper."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 11) and (capability is None or capability in CUDNN_FIRST)


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, grouped: bool, cudnn: bool
) -> AttentionKernel:
    """Return the kernel for such arguments. ``grouped``: fewer heads of keys than of queries, by ``enable_gqa``."""
    parts = (query, key, value)
    width, value_width = query.shape[-1], value.shape[-1]
    same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    fits = all(part.dim() == 4 for part in parts) and query.shape[0] == key.shape[0] == value.shape[0]
    fits = fits and bool(query.shape[-2] and key.shape[-2]) and all(part.stride(-1) == 1 for part in parts)
    if not fits or not (same_heads or grouped):
        return AttentionKernel.MATH
    narrow = query.dtype in SIXTEEN_BITS
    if (
        cudnn
        and narrow
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
        and max(width, value_width) <= CUDNN_HEAD
        and not width % HEAD_STEP
        and not value_width % HEAD_STEP
        and key.shape[-2] > 1
    ):
        return AttentionKernel.CUDNN
    if (
        narrow
        and mask is None
        and width == value_width <= FLASH_HEAD
        and not (causal and query.shape[-2] != key.shape[-2])
        and torch.backends.cuda.flash_sdp_enabled()
    ):
        return AttentionKernel.FLASH
    if (
        same_heads
        and query.dtype in (*SIXTEEN_BITS, torch.float32)
        and all(size * query.element_size() % ALIGNED_BYTES == 0 for size in (width, value_width))
        and (mask is None or mask.stride(-1) == 1)
        and torch.backends.cuda.mem_efficient_sdp_enabled()
    ):
        return AttentionKernel.EFFICIENT
    return AttentionKernel.MATH


def attention_on(capability: tuple[int, int] | None) -> Callable[..., Tensor]:
    """Return ``scaled_dot_product_attention`` as it runs on a GPU of that compute capability."""
    return partial(_attention, prefers_cudnn(capability))


def _attention(
    cudnn: bool,
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
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    kernel = choose_kernel(query, key, value, attn_mask, causal=is_causal, grouped=grouped, cudnn=cudnn)
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        zero, least = (torch.full((), number, dtype=query.dtype) for number in (0.0, float("-inf")))
        bias = torch.where(bias, zero, least)
    found: Any
    if kernel is AttentionKernel.CUDNN:
        found = ATEN._scaled_dot_product_cudnn_attention(
            query, key, value, bias, trained, dropout_p, is_causal, False, scale=scale
        )
    elif kernel is AttentionKernel.FLASH:
        width = query.shape[-1]
        pad = partial(F.pad, pad=(0, -width % HEAD_STEP))
        padded = (pad(each) for each in (query, key, value)) if width % HEAD_STEP else (query, key, value)
        found = ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        return found[0][..., :width]  # type: ignore[no-any-return]
    elif kernel is AttentionKernel.EFFICIENT:
        if bias is not None:
            length = bias.shape[-1]
            if length % BIAS_STEP:
                bias = F.pad(bias, (0, -length % BIAS_STEP))[..., :length]
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        found = ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, trained, dropout_p, is_causal, scale=scale
        )
    else:
        options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
        found = ATEN._scaled_dot_product_attention_math(
            query, key, value, bias, dropout_p, is_causal, None, scale=scale, **options
        )
    return found[0]  # type: ignore[no-any-return]
