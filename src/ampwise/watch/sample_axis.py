"""The axis of the samples of a batch, followed from a loss back through its graph.

Each sample has a loss of its own, so the first axis of the logits is that of the samples. The operations that computed
them say where this axis was before: transposed, selected, reshaped. What is not known for certain ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ampwise.watch.inspection import ARITHMETIC

__all__ = ["PER_ELEMENT", "RESHAPING", "Along", "operations_along", "shape_of", "signed"]

MOST_NODES = 400
UNSIGNED = 2**64
PER_ELEMENT = (
    *ARITHMETIC,
    *(
        f"{kind}Backward"
        for kind in (
            *("Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Tanh", "Sigmoid", "Softplus", "Hardtanh", "Clamp", "Exp"),
            *("Log", "Pow", "Sqrt", "Abs", "NativeDropout", "Clone", "ToCopy", "NativeLayerNorm", "Contiguous"),
            *(
                "Softmax",
                "LogSoftmax",
                "Slice",
                "Split",
                "Where",
                "MaskedFill",
                "PreluKernel",
                "Square",
                "Rsqrt",
                "Identity",
            ),
            # Losses of single values.
            *("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        )
    ),
)
RESHAPING = tuple(f"{kind}Backward" for kind in ("Squeeze", "View", "UnsafeView", "ReshapeAlias", "ViewCopy"))
WITH_BATCH_FIRST = tuple(
    f"{kind}Backward"
    for kind in ("Convolution", "NativeBatchNorm", "MaxPool2DWithIndices", "AvgPool2D", "MeanPool", "AdaptiveAvgPool2D")
)


class Along(NamedTuple):
    """An operation of the graph, and which axis of its result is that of the samples."""

    node: Any
    axis: int
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """Where the samples are in a shape: the axis has ``outer`` groups of samples, each of ``inner`` values."""

    axis: int
    outer: int = 1
    inner: int = 1


def operations_along(node: Any, number: int, axis: int) -> Iterator[Along]:
    """Yield the operations from which a result was computed, as long as the axis of its samples is known in them.

    number: of the result of the node.
    """
    pending, seen = [(node, number, _Place(axis))], set[tuple[Any, _Place]]()
    while pending and len(seen) < MOST_NODES:
        node, number, place = pending.pop()
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        shape = shape_of(node, number)
        if shape is None or place.axis >= len(shape):
            continue
        if place.outer == place.inner == 1:
            yield Along(node, place.axis, shape)
        for (before, result), there in zip(node.next_functions, _places_before(node, place, shape), strict=False):
            if before is not None and there is not None:
                pending.append((before, result, there))


def _places_before(node: Any, place: _Place, shape: tuple[int, ...]) -> list[_Place | None]:
    """Return where the samples are in each tensor that an operation was given; None where it is not known."""
    given = [shape_of(*each) if each[0] is not None else None for each in node.next_functions]
    if node.name().rstrip("0123456789") in RESHAPING:
        return [None if each is None else _reshaped(each, shape, place) for each in given]
    size = shape[place.axis]
    return [
        place._replace(axis=axis)
        if axis is not None and before is not None and 0 <= axis < len(before) and before[axis] == size
        else None
        for axis, before in zip(_axes_before(node, place.axis, shape), given, strict=False)
    ]


def shape_of(node: Any, number: int) -> tuple[int, ...] | None:
    """Return the shape of one of the results of a node's forward operation; None where it is not known."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[number].shape) if metadata and number < len(metadata) else None


def _axes_before(node: Any, axis: int, shape: tuple[int, ...]) -> list[int | None]:
    """Return the axis in each tensor that an operation was given; None where there is none, or it is not known."""
    name, given = node.name().rstrip("0123456789"), node.next_functions
    first = shape_of(*given[0]) if given and given[0][0] is not None else None
    if name == "TBackward":
        return [1 - axis]
    if name == "PermuteBackward":
        return [signed(node._saved_dims[axis], len(shape))]
    if name == "TransposeBackward":
        swap = [signed(each, len(shape)) for each in (node._saved_dim0, node._saved_dim1)]
        return [swap[1 - swap.index(axis)] if axis in swap else axis]
    if name == "SelectBackward":
        return [axis + (axis >= signed(node._saved_dim, len(shape) + 1))]
    if name == "UnsqueezeBackward":
        dim = signed(node._saved_dim, len(shape))
        return [None if axis == dim else axis - (axis > dim)]
    if name in ("SumBackward", "MeanBackward", "AmaxBackward", "MaxBackward") and hasattr(node, "_saved_dim"):
        return [_reduced(node, first, axis)]
    if name == "AddmmBackward":  # the bias, the input and the weights
        return [None, 0 if axis == 0 else None, None]
    if name in ("MmBackward", "BmmBackward"):
        rows = len(shape) - 2
        return [axis if axis <= rows else None, axis if axis < rows else None]
    if name == "GatherBackward":
        return [axis if axis != signed(node._saved_dim, len(shape)) else None]
    if name in ("CatBackward", "StackBackward"):
        return [axis] * len(given) if name == "CatBackward" and signed(node._saved_dim, len(shape)) != axis else []
    if name in WITH_BATCH_FIRST or (name == "NllLossBackward" and len(shape) == 1):
        return [0 if axis == 0 else None]
    if name in PER_ELEMENT or name.startswith(ARITHMETIC) or name == "ExpandBackward":
        before = [shape_of(*each) if each[0] is not None else None for each in given]
        return [None if each is None else axis - (len(shape) - len(each)) for each in before]
    return []


def _reshaped(before: tuple[int, ...], shape: tuple[int, ...], place: _Place) -> _Place | None:
    """Return where the samples were before a view, by the number of values in front of them and after them."""
    samples = shape[place.axis] // (place.outer * place.inner)
    ahead = math.prod(shape[: place.axis]) * place.outer
    for axis, size in enumerate(before):
        first = math.prod(before[:axis])
        if first <= ahead < first * size:
            outer, left = divmod(ahead, first)
            inner, rest = divmod(size, outer * samples)
            return None if left or rest or samples < 2 else _Place(axis, outer, inner)
    return None


def _reduced(node: Any, before: tuple[int, ...] | None, axis: int) -> int | None:
    dims = node._saved_dim if isinstance(node._saved_dim, tuple) else (node._saved_dim,)
    if before is None or not dims:
        return None
    if getattr(node, "_saved_keepdim", False):
        return axis
    gone = {signed(each, len(before)) for each in dims}
    left = [each for each in range(len(before)) if each not in gone]
    return left[axis] if axis < len(left) else None


def signed(dim: int, rank: int) -> int:
    """Return an axis that torch has kept as an unsigned number, counted from the front."""
    dim = dim - UNSIGNED if dim >= UNSIGNED // 2 else dim
    return dim + rank if dim < 0 else dim
