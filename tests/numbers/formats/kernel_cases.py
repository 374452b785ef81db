"""Tensors that reach every corner of rounding, in Triton's interpreter and on a GPU, and what is the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ampwise.numbers.formats import BLOCK_FORMATS, FORMATS, BlockFormat, Format

ALL = {**FORMATS, **BLOCK_FORMATS}
WITHOUT_KERNEL = {"fp64", "fp32", "e8m0"}  # nothing to round, and a scale
FUSED: dict[str, Format | BlockFormat] = {name: fmt for name, fmt in ALL.items() if name not in WITHOUT_KERNEL}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(), (1,), (33,), (3, 70), (40, 5), (64, 130), (2, 37, 3), (2, 3, 32, 2), (5, 1, 31), (0, 4)]


def any_bits(dtype: torch.dtype, count: int) -> Tensor:
    size = dtype.itemsize
    random = np.random.default_rng(size).integers(0, 256, count * size, dtype=np.uint8)
    return torch.from_numpy(random).view(dtype)


def between(dtype: torch.dtype, count: int, low: float, high: float) -> Tensor:
    """Of both signs, with exponents in this range."""
    random = np.random.default_rng(1)
    values = random.uniform(1, 2, count) * random.choice([-1, 1], count) * np.exp2(random.uniform(low, high, count))
    return torch.from_numpy(values).to(dtype)


def hard_values(dtype: torch.dtype, count: int) -> dict[str, Tensor]:
    """Random bits alone would hardly ever leave a block finite, or be near the range of a narrow format."""
    return {
        "any bits": any_bits(dtype, count),
        "moderate": between(dtype, count, -24, 10),
        "tiny": between(dtype, count, -149, -100),
        "subnormal": between(dtype, count, -149, -130),
        "huge": between(dtype, count, 100, 127),
        "ties": (between(torch.float32, count, 0, 5).round() / 8).to(dtype),
        "zeros": torch.zeros(count, dtype=dtype).copysign(between(dtype, count, 0, 1)),
    }


def nvfp4_ties(largest: float) -> Tensor:
    """Blocks whose values are as near to ties of their quotients as FP32 comes, by the tensor's largest magnitude."""
    whole = np.float64(np.float32(largest / (6 * 448)))
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = np.array([2.0**-9, 2.0**-8, 0.3125, 1.0, 1.125, 3.75, 13.0, 240.0])
    exact = (ties[None, :] * scales[:, None] * whole).astype(np.float32)
    around = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
    blocks = np.zeros((1 + 3 * len(scales), 16), np.float32)
    blocks[0, 0] = largest
    for place, values in enumerate(around):
        rows = slice(1 + place * len(scales), 1 + (place + 1) * len(scales))
        blocks[rows, :7], blocks[rows, 7] = values, (6 * scales * whole).astype(np.float32)
    return torch.from_numpy(blocks)


def views(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values, lying in memory in several ways."""
    count = int(np.prod(shape))
    whole = between(dtype, count, -20, 20).reshape(shape)
    found = {"contiguous": whole}
    if len(shape) >= 2:
        found["transposed"] = whole.transpose(0, 1).contiguous().transpose(0, 1)
        found["a part"] = torch.stack([whole, whole], dim=-1)[..., 0]
        found["repeated"] = whole[:, :1].expand(shape)
    return found


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """The same values, NaN in the same places, zeros of the same sign."""
    ours = ours.cpu()
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    same = torch.where(expected.isnan(), ours.isnan(), (ours == expected) & (ours.signbit() == expected.signbit()))
    wrong = (~same.reshape(-1)).nonzero().flatten()[:5]
    assert same.all(), (ours.reshape(-1)[wrong].tolist(), expected.reshape(-1)[wrong].tolist())
