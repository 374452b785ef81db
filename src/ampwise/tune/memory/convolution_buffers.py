"""Workspaces that cuDNN takes for convolutions, by rules read off 37 convolutions on an H200 (torch 2.11, cuDNN 9.19).

In 16 bits and TF32 the tensor cores want channels last: other tensors are copied into the workspace. In FP32 cuDNN
chooses among algorithms at run time: Winograd's for the gradient of 3 × 3 weights, a Fourier transform of tiles for
that of the inputs. These are its usual choices, not its only ones: one of the convolutions, of 8 × 256 × 56 × 56 inputs
and 512 outputs, took 4.5 GB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
FLOAT = 4  # bytes
CHANNEL_STEP = 8  # channels that tensor cores take at once, in 16 bits; fewer are padded
POINTWISE_PARTS = 16  # sums of a 1 × 1 weight's gradient, in FP32; of so few tiles
POINTWISE_TILE, POINTWISE_TILES = 128, 32
TILE = 4  # outputs of Winograd's algorithm on a side, computed from tiles of 6 × 6
TILE_NUMBERS = 36
FOURIER_TILE = 32 * 17 * 8  # bytes of a transformed tile of 32 × 32
FOURIER_SIDE = 28  # images smaller than this are not transformed, and from what sizes on in two steps
FOURIER_WEIGHTS = 2**16  # nor are weights of more channels than 256 × 256
FEW_CHANNELS, SMALL_KERNEL, LARGE_KERNEL, SMALL_IMAGE = 8, 4, 8, 14
WIDEST_LOAD = 4  # elements in FP32


def _copies(x: Tensor, weight: Tensor, out: Sequence[int], step: int = 1) -> int:
    """Return the bytes of copies of input, output and weights with channels last, padded to multiples of ``step``."""

    def elements(shape: Sequence[int]) -> int:
        return shape[0] * -(-shape[1] // step) * step * math.prod(shape[2:])

    weights = 0 if _is_pointwise(weight) else elements(weight.shape)
    return x.element_size() * (elements(x.shape) + elements(out) + weights)


def _is_pointwise(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_native(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether nothing is copied: channels last already, or one of torch's own kernels, for depthwise convolutions."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for each in (x, weight):
        last = each.dim() in formats and each.is_contiguous(memory_format=formats[each.dim()])
        if last and not each.is_contiguous():
            return True
    return groups > 1 and groups == max(x.shape[1], weight.shape[0])


def _on_tensor_cores(x: Tensor, weight: Tensor, out: Sequence[int]) -> int:
    if _is_pointwise(weight) and not math.prod(x.shape[2:]) * math.prod(out[2:]) % 2:
        return 0  # a matmul; only an odd number of pixels is not aligned
    return _copies(x, weight, out, CHANNEL_STEP if x.element_size() < FLOAT else 1)


class Convolutions:
    """Workspaces of a convolution's passes. ``tf32``: whether those in FP32 run in TF32."""

    def __init__(self, *, tf32: bool) -> None:
        self._tf32 = tf32

    def _narrow(self, x: Tensor) -> bool:
        return self._tf32 or x.element_size() < FLOAT

    def forward(self, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
        """Return the bytes in a forward pass, from the arguments of ``aten::convolution``."""
        _bias, stride, padding, dilation, transposed, output_padding, groups = rest
        if not self._narrow(x) or _is_native(x, weight, groups):
            return 0
        if x.shape[1] < FEW_CHANNELS and max(weight.shape[2:]) <= SMALL_KERNEL:
            return 0
        out = _out_shape(x, weight, stride, padding, dilation, transposed, output_padding, groups)
        return _on_tensor_cores(x, weight, out)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
        """Return the bytes in a backward pass, beside the gradients, which ``aten::convolution_backward`` returns."""
        _bias, stride, _padding, dilation, transposed, _output_padding, groups, wanted = rest
        if _is_native(x, weight, groups):
            return 0
        out = gradient.shape
        few = x.shape[1] < FEW_CHANNELS
        if self._narrow(x):
            if few and x.element_size() == FLOAT and (x.dim() == 3 or max(weight.shape[2:]) <= SMALL_KERNEL):
                return 0
            tiles = math.prod(-(-size // POINTWISE_TILE) for size in weight.shape[:2])
            shared = _is_pointwise(weight) and tiles < POINTWISE_TILES  # sums are shared among processors
            parts = POINTWISE_PARTS * weight.numel() * FLOAT if shared else 0
            return max(_on_tensor_cores(x, weight, out), parts)
        simple = groups == 1 and not transposed and {*stride, *dilation} == {1}
        if simple and not few and list(weight.shape[2:]) == [3, 3]:
            return max(_winograd(x, weight, out), _fourier(x, weight) if wanted[0] else 0)
        if x.dim() == 4 and max(weight.shape[2:]) >= LARGE_KERNEL:
            return _copies(x, weight, out, WIDEST_LOAD)
        copied = transposed or (simple and _is_pointwise(weight) and min(out[2:]) <= SMALL_IMAGE)
        copied = copied or (not few and (x.dim() == 5 or (x.dim() == 3 and max(stride) > 1)))
        return _copies(x, weight, out) if copied and groups == 1 else 0


def _winograd(x: Tensor, weight: Tensor, out: Sequence[int]) -> int:
    tiles = out[0] * math.prod(-(-side // TILE) for side in out[2:])
    return TILE_NUMBERS * FLOAT * (tiles * (x.shape[1] + out[1]) + weight.shape[0] * weight.shape[1])


def _fourier(x: Tensor, weight: Tensor) -> int:
    channels, pairs = weight.shape[0] + weight.shape[1], weight.shape[0] * weight.shape[1]
    side = min(x.shape[2:])
    if side < FOURIER_SIDE or pairs > FOURIER_WEIGHTS:
        return 0
    return FOURIER_TILE * (pairs + x.shape[0] * channels * (2 if side > FOURIER_SIDE else 1))


def _out_shape(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> list[int]:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
    if transposed:
        found = [(n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in sides]
        return [x.shape[0], weight.shape[1] * groups, *found]
    return [x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sides)]


CONVOLUTIONS = (ATEN.convolution.default, ATEN.convolution_backward.default)


def convolution_buffers(*, tf32: bool) -> dict[Any, Callable[..., int]]:
    """Return, by operator, the bytes that it allocates while it runs."""
    convolutions = Convolutions(tf32=tf32)
    return dict(zip(CONVOLUTIONS, (convolutions.forward, convolutions.backward), strict=True))
