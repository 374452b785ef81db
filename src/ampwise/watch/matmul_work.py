"""FLOPs, precision and alignment of a matmul, from the shapes and dtypes that its operator was called with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ampwise.watch.time_use import ProfiledMatmul

__all__ = ["PRECISIONS", "OperatorCall", "is_matmul", "matmul_of"]

PRECISIONS = {
    "double": "fp64",
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
WORD = 16  # bytes that tensor cores load at once

# Operator, and the position of the first of its two matrices among the arguments.
GEMMS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
    "aten::_scaled_mm": 0,
}
ATTENTION = "aten::_scaled_dot_product_"
AS_PRODUCTS = "aten::_scaled_dot_product_attention_math"  # attention that calls the matmuls above


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """An operator's call: for each argument its shape, strides, dtype and, if it is not a tensor, its value."""

    name: str
    shapes: Sequence[Sequence[int]] = ()
    strides: Sequence[Sequence[int]] | None = None  # None: this torch does not record them
    formats: Sequence[str] = ()
    values: Sequence[Any] | None = field(default=None)


@lru_cache(maxsize=1024)
def is_matmul(name: str) -> bool:
    """Whether the operator is one whose FLOPs are counted here."""
    return name in GEMMS or name in CONVOLUTIONS or (name.startswith(ATTENTION) and not name.startswith(AS_PRODUCTS))


def matmul_of(call: OperatorCall) -> ProfiledMatmul | None:
    """Return what the call computed; None if its arguments do not show it."""
    try:
        if call.name in GEMMS:
            return _gemm(call, GEMMS[call.name])
        if call.name in CONVOLUTIONS:
            return CONVOLUTIONS[call.name](call)
        return _attention(call)
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # unexpected shapes: a nested tensor, an argument left out


def _gemm(call: OperatorCall, first: int) -> ProfiledMatmul:
    left, right = call.shapes[first], call.shapes[first + 1]
    precision = PRECISIONS[call.formats[first]]
    flops = 2 * math.prod(left) * right[-1]
    # The result is stored by rows, whatever its inputs are; forward and backward together show each size of a layer.
    starts = [right[-1]]
    if call.strides is not None:
        starts = [_row_step(left, call.strides[first]), _row_step(right, call.strides[first + 1]), right[-1]]
    return _made(call, f"{_size(left)} @ {_size(right)}", precision, flops, starts)


def _row_step(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements between the starts of two rows, or of two columns of a column-major matrix."""
    rows, columns = shape[-2:]
    by_rows, by_columns = strides[-2:]
    if columns == 1 or rows == 1:
        return 0  # a single row or column has no stride
    return by_rows if by_columns == 1 else by_columns


def _convolution(call: OperatorCall) -> ProfiledMatmul:
    taken, weight = call.shapes[0], call.shapes[1]
    assert call.values is not None
    stride, padding, dilation, transposed = call.values[3:7]
    if transposed:
        positions = math.prod(taken[2:])
    else:
        dimensions = len(taken) - 2
        settings = (_spread(given, dimensions) for given in (stride, padding, dilation))
        positions = math.prod(map(_positions, taken[2:], weight[2:], *settings))
    return _convolved(call, 0, 2 * taken[0] * positions * math.prod(weight), taken, weight)


def _positions(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _convolution_backward(call: OperatorCall) -> ProfiledMatmul:
    gradient, taken, weight = call.shapes[:3]
    assert call.values is not None
    transposed, wanted = call.values[7], call.values[10]
    positions = math.prod((taken if transposed else gradient)[2:])
    once = 2 * taken[0] * positions * math.prod(weight)
    return _convolved(call, 1, once * sum(map(bool, wanted[:2])), taken, weight)


def _convolved(
    call: OperatorCall, which: int, flops: int, taken: Sequence[int], weight: Sequence[int]
) -> ProfiledMatmul:
    shape = f"{_size(taken)} * {_size(weight)}"
    return _made(call, shape, PRECISIONS[call.formats[which]], flops, [taken[1], weight[0]])


def _spread(given: Sequence[int], dimensions: int) -> Sequence[int]:
    return list(given) * dimensions if len(given) == 1 else given


def _attention(call: OperatorCall) -> ProfiledMatmul:
    backward = call.name.endswith("_backward")
    query, key, value = call.shapes[1:4] if backward else call.shapes[:3]
    batch, heads, queries, width = query
    keys = key[2]
    scores, weighted = (2 * batch * heads * queries * keys * size for size in (width, value[3]))
    # Backward: the scores are recomputed, and there are two matmuls each for scores and values.
    flops = 3 * scores + 2 * weighted if backward else scores + weighted
    precision = PRECISIONS[call.formats[1 if backward else 0]]
    return _made(call, f"{_size(query)}, {_size(key)}", precision, flops, [width, value[3]])


def _made(call: OperatorCall, shape: str, precision: str, flops: float, starts: Sequence[int] | None) -> ProfiledMatmul:
    multiple = WORD // BYTES[precision]
    aligned = None if starts is None else all(start % multiple == 0 for start in starts)
    name = call.name.removeprefix("aten::")
    return ProfiledMatmul(op=name, shape=shape, precision=precision, flops=float(flops), aligned=aligned)


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


CONVOLUTIONS = {"aten::convolution": _convolution, "aten::convolution_backward": _convolution_backward}
