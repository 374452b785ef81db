"""Views that take the axes of a result for others: read from the graph of a loss, which keeps all shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampwise.watch.graph_lines import graph_nodes
from ampwise.watch.inspection import RECURRENT
from ampwise.watch.sample_axis import PER_ELEMENT, RESHAPING, shape_of, signed

__all__ = ["swapping_views"]

LONGEST = 32  # nodes from a view back to a layer
VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")
LINEAR = ("AddmmBackward", "MmBackward")
LAYERS = tuple(f"{kind}Backward" for kind in ("Embedding", "Convolution", "NativeLayerNorm", "NativeBatchNorm"))
CHANNELS_FIRST = ("ConvolutionBackward", "NativeBatchNormBackward", "CudnnBatchNormBackward", "Upsample")
ACTIVATIONS = tuple(f"{kind}Backward" for kind in ("Relu", "Gelu", "Silu", "Tanh", "LeakyRelu", "Mul", "NativeDropout"))
SOFTMAX = ("SoftmaxBackward", "SafeSoftmaxBackward")
PARTS = ("SplitBackward", "SliceBackward", "CloneBackward")  # such as query, key and value
KERNELS = ("ScaledDotProduct",)


def swapping_views(loss: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield views that swap the sizes of axes of what a layer has made, and what they do.

    Also those that join the last states of an RNN's layers and directions, which come first, and not those of a sample,
    those that take neighbours for the channels, and those that split or join the heads of attention.
    """
    for each in graph_nodes(loss):
        if not each.name().startswith(VIEWS):
            continue
        given, number = each.next_functions[0]
        shape, before = shape_of(each, 0), None if given is None else shape_of(given, number)
        if shape is None or before is None:
            continue
        shapes = f"from {tuple(before)} to {tuple(shape)}"
        if len(shape) == 2 and len(before) == 3 and _joins_states(given, number, before, shape):
            yield each, f"{shapes}: a row has states of several samples, as the first axis is that of the layers"
        if _spreads_channels(given, before, shape):
            size = shape[1]
            yield each, f"{shapes}: a row gets {size} neighbours along the last axis, not the {size} values of axis 1"
        if _splits_heads(given, before, shape):
            yield each, f"{shapes}: a head gets parts of several positions, as these come before the heads"
        if _joins_heads(given, before, shape):
            yield each, f"{shapes}: a row has parts of several positions, as the heads come before these"
        if len(shape) != len(before) or sorted(shape) != sorted(before):
            continue
        if [size for size in shape if size > 1] != [size for size in before if size > 1] and _is_layer(given):
            yield each, f"{shapes}: this swaps the sizes, and not the axes"


def _splits_heads(given: Any, before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a view takes (samples, positions, heads * values) of a layer for (samples, heads, positions, values)."""
    if len(before) != 3 or len(shape) != 4 or shape[0] != before[0] or shape[2] != before[1]:
        return False
    return 1 < shape[1] != shape[2] > 1 and shape[3] > 1 and shape[1] * shape[3] == before[2] and _is_linear(given)


def _is_linear(node: Any) -> bool:
    """Whether the last axis of a result is that of the outputs of a linear layer."""
    while node is not None and node.name().startswith(PARTS):
        node = node.next_functions[0][0]
    while node is not None and node.name().startswith(("AddBackward", *VIEWS)):
        shape = shape_of(node, 0) or ()
        node = next((each for each, of in node.next_functions if (shape_of(each, of) or ())[-1:] == shape[-1:]), None)
    return node is not None and node.name().startswith(LINEAR)


def _joins_heads(given: Any, before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a view takes what attention gives, (samples, heads, positions, values), for (samples, positions, all)."""
    if len(before) != 4 or min(before[1:]) < 2 or before[1] == before[2]:
        return False
    samples, heads, positions, values = before
    if shape not in ((samples, positions, heads * values), (samples * positions, heads * values)):
        return False
    while given is not None and given.name().startswith((*VIEWS, "CloneBackward")):  # also those around a matmul
        given = given.next_functions[0][0]
    if given is not None and given.name().startswith(KERNELS):
        return shape_of(given, 0) == before
    weights = given.next_functions[0][0] if given is not None and given.name().startswith("BmmBackward") else None
    while weights is not None and weights.name().startswith((*RESHAPING, "ExpandBackward", "MulBackward")):
        weights = weights.next_functions[0][0]
    is_softmax = weights is not None and weights.name().startswith(SOFTMAX)
    return is_softmax and (shape_of(weights, 0) or ())[:3] == before[:3]


def _joins_states(given: Any, number: int, before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a view takes states of shape (layers, samples, features) for (samples, layers * features)."""
    layers, samples, features = before
    if shape != (samples, layers * features) or layers < 2 or layers == samples or samples < 2:
        return False
    while given is not None and given.name().startswith(("SliceBackward", "NativeDropoutBackward")):
        given, number = given.next_functions[0]
    if given is None or not given.name().startswith("StackBackward") or signed(given._saved_dim, 3):
        return given is not None and number == 1 and given.name().startswith(RECURRENT)
    return any(each.name().startswith(RECURRENT) and of > 0 for each, of in given.next_functions if each is not None)


def _spreads_channels(given: Any, before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a view takes values of shape (samples, channels, ...) for (all positions, channels)."""
    channels = shape[-1]
    if len(shape) != 2 or len(before) < 3 or before[1] != channels or channels < 2 or shape[0] == before[0]:
        return False
    if channels in (math.prod(before[at:]) for at in range(2, len(before) + 1)):  # or for rows of another axis
        return False
    for _ in range(LONGEST):
        if given is None:
            return False
        if given.name().startswith(SOFTMAX):
            return signed(given._saved_dim, len(before)) == 1
        if given.name().startswith(CHANNELS_FIRST):
            return True
        if not given.name().startswith((*ACTIVATIONS, "AddBackward", "SigmoidBackward")):
            return False
        given = next((each for each, _ in given.next_functions if each is not None), None)
    return False


def _is_layer(node: Any) -> bool:
    """Whether a result is that of a layer, whose axes have a meaning, perhaps after an activation."""
    for _ in range(LONGEST):
        if node is None:
            return False
        if node.name().startswith((*LAYERS, *RECURRENT, *LINEAR)):
            return True
        shape = shape_of(node, 0)
        if shape is None or not node.name().startswith((*PER_ELEMENT, *VIEWS, "StackBackward")):
            return False
        given = [(each, of) for each, of in node.next_functions if each is not None]
        if node.name().startswith(VIEWS):  # of a linear layer, which has flattened its input, or of rows of samples
            given = [(each, of) for each, of in given if (shape_of(each, of) or ())[-1:] == shape[-1:]]
        elif not node.name().startswith("StackBackward"):
            given = [(each, of) for each, of in given if len(shape_of(each, of) or ()) == len(shape)]
        node = given[0][0] if given else None
    return False
