"""Sizes and memory layout of a matmul, from the tensors that an operator is called with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampwise.tune.align.alignment import common_stride

__all__ = ["CHANNELS", "MatmulShape", "shape_reader"]

ATTENTION = "aten::_scaled_dot_product_"
AS_PRODUCTS = "aten::_scaled_dot_product_attention_math"  # it calls matmuls itself
CHANNELS = 4  # of an image: libraries pad those themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulShape:
    """Sizes m, n and k by letter, and the row strides of the matrices stored along them."""

    kind: str
    sizes: Mapping[str, int]
    rows: Mapping[str, int]
    flops: float
    batches: int = 1
    stored: tuple[str, ...] = ()
    operands: tuple[Tensor, ...] = ()  # left and right, one of which may be a weight
    roles: Mapping[str, str] | None = None  # of m, n and k, where the operator defines them


Reader = Callable[[Sequence[Any], Any], MatmulShape | None]


def shape_reader(name: str) -> Reader | None:
    """Return the reader for calls of an operator, such as "aten::mm"; None if it is not a matmul."""
    if name in GEMMS:
        first = GEMMS[name]
        return lambda args, made: _gemm(args[first], args[first + 1], made)
    if name.startswith(ATTENTION) and not name.startswith(AS_PRODUCTS):
        return _attention_backward if name.endswith("_backward") else _attention
    return OTHERS.get(name)


def _gemm(left: Tensor, right: Tensor, made: Tensor) -> MatmulShape:
    *batch, m, k = left.shape
    n = right.shape[-1]
    along = [_stored(left, "mk"), _stored(right, "kn"), _stored(made, "mn")]
    steps: dict[str, list[int]] = {}
    for letter, step in filter(None, along):
        steps.setdefault(letter, []).append(step)
    batches = math.prod(batch)
    return MatmulShape(
        kind="product",
        sizes={"m": m, "n": n, "k": k},
        rows={letter: row for letter, found in steps.items() if (row := common_stride(found))},
        flops=2.0 * batches * m * n * k,
        batches=batches,
        stored=tuple(each[0] if each else "" for each in along),
        operands=(left, right),
    )


def _stored(matrix: Tensor, letters: str) -> tuple[str, int] | None:
    """Return along which of its sizes a matrix is stored, and the alignment of its rows in elements, offset included.

    None for a single row, and for an expanded matrix.
    """
    rows, columns = matrix.shape[-2:]
    by_rows, by_columns = matrix.stride()[-2:]
    others = (*matrix.stride()[:-2], matrix.storage_offset())
    if rows == 1 or columns == 1 or 0 in (by_rows, by_columns):
        return None
    if by_columns == 1:
        return letters[1], math.gcd(by_rows, *others)
    if by_rows == 1:
        return letters[0], math.gcd(by_columns, *others)
    return letters[1], columns  # it is copied first, row by row


def _linear(args: Sequence[Any], made: Tensor) -> MatmulShape:
    given, weight = args[0], args[1]
    return _gemm(given.reshape(-1, given.shape[-1]), weight.t(), made.reshape(-1, made.shape[-1]))


def _convolution(args: Sequence[Any], made: Tensor) -> MatmulShape:
    given, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return _convolved(given, weight, made, transposed, groups, times=1)


def _convolution_backward(args: Sequence[Any], made: Any) -> MatmulShape:
    gradient, given, weight, transposed, groups, wanted = args[0], args[1], args[2], args[7], args[9], args[10]
    return _convolved(given, weight, gradient, transposed, groups, times=sum(map(bool, wanted[:2])))


def _convolved(given: Tensor, weight: Tensor, made: Tensor, transposed: bool, groups: int, times: int) -> MatmulShape:
    kernel = math.prod(weight.shape[2:])
    inputs, outputs = given.shape[1] // groups, made.shape[1] // groups
    positions = math.prod((given if transposed else made).shape[2:]) * given.shape[0]
    channels = {"n": outputs, "k": inputs}
    own_kernels = groups > 1 and min(inputs, outputs) <= CHANNELS  # depthwise: no matrices are multiplied
    return MatmulShape(
        kind="convolution",
        sizes={"m": positions, **channels},
        rows={} if own_kernels else {letter: size for letter, size in channels.items() if size > CHANNELS},
        flops=2.0 * times * positions * inputs * outputs * groups * kernel,
        operands=(given, weight),
        roles={"m": "rows", "n": "output channels", "k": "input channels"},
    )


def _attention(args: Sequence[Any], made: Any, times: float = 1.0) -> MatmulShape | None:
    query, key, value = args[:3]
    if query.ndim != 4:
        return None
    batch, heads, asked, width = query.shape
    known, wide = key.shape[2], value.shape[3]
    return MatmulShape(
        kind="attention",
        sizes={"m": asked, "n": known, "k": width},
        rows={"k": math.gcd(width, wide)},
        flops=2.0 * times * batch * heads * asked * known * (width + wide),
        batches=batch * heads,
        operands=(query, key),
        roles={"m": "queries", "n": "keys", "k": "head size"},
    )


def _attention_backward(args: Sequence[Any], made: Any) -> MatmulShape | None:
    return _attention(args[1:], made, times=2.5)  # recomputes the scores, then two matmuls for each of the forward's


# For each operator, the index of the first of the two matrices among its arguments.
GEMMS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
    "aten::_scaled_mm": 0,
}
OTHERS: dict[str, Reader] = {
    "aten::linear": _linear,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
