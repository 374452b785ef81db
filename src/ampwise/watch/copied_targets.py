"""Targets that the model reads at the same positions: found in the graph of a loss, which it can copy them into.

An embedding keeps its tokens, and a cross entropy its targets. Between the two there must be a way that no position
leaves: through linear layers, norms, residual connections. What masks values on this way ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.watch.graph_lines import graph_nodes
from ampwise.watch.inspection import MOVING, RECURRENT, saved_tensor, saved_tensors
from ampwise.watch.sample_axis import shape_of, signed

__all__ = ["Copied", "copied_targets"]

MOST_NODES = 2000
LEAST_TOKENS = 32  # that are compared
SHARE = 0.95  # of the targets that are the tokens
MOST_COUNTED = 0.95  # of the positions, where only some of them are predicted
LEAST_STEPS = 4
NONE = 0  # the value of reduction="none" in torch's loss nodes
SOFTMAX = ("SoftmaxBackward", "SafeSoftmaxBackward")
KERNELS = ("ScaledDotProduct",)
# What computes each position from the same position: its inputs have the shape of its result, or are views of it.
SAME = tuple(
    f"{kind}Backward"
    for kind in (
        *("Add", "Sub", "Neg", "Relu", "Gelu", "Silu", "Tanh", "Sigmoid", "LeakyRelu", "NativeLayerNorm", "Softmax"),
        *("LogSoftmax", "NativeDropout", "FusedRmsNorm", "LayerNorm", "RmsNorm", "Identity"),
    )
)
MOVED = (*MOVING, *(f"{kind}Backward" for kind in ("ReshapeAlias", "Transpose", "Permute", "T")))
LINEAR = {"AddmmBackward": 1, "MmBackward": 0, "LinearBackward": 0}  # and which input is not a weight


class Copied(NamedTuple):
    """An embedding that reads the targets of a loss."""

    embedding: Any
    what: str  # "masked" if the loss counts some positions only, or "causal"


def copied_targets(loss: Tensor, picks: Any) -> Copied | None:
    """Return the embedding that reads the targets where a loss counts them; None if there is none, or it may be meant.

    It is no mistake in an autoencoder: either the loss counts some of the positions only, and others are no padding, or
    attention is causal, as in a language model, whose targets are the next tokens. picks: where the loss picks them.
    """
    targets = saved_tensor(picks, "target")
    if targets is None or not targets.is_cpu or targets.is_floating_point() or targets.numel() < LEAST_TOKENS:
        return None  # on a GPU comparing would sync
    targets = targets.reshape(-1)
    counted = targets != getattr(picks, "_saved_ignore_index", -100)
    nodes = graph_nodes(loss)
    for weights in _weights_of_positions(nodes, picks, targets.numel()):
        counted &= weights != 0
    start, positions = _chosen(picks.next_functions[0][0])
    for embedding in _read_in_place(start) if int(counted.sum()) >= LEAST_TOKENS else ():
        tokens = saved_tensor(embedding, "indices")
        if tokens is None or tokens.dim() != 2 or tokens.shape[1] < LEAST_STEPS:
            continue
        for rows in (tokens, tokens.T):
            read = rows.reshape(-1)
            places = torch.arange(targets.numel()) if positions is None else positions
            if len(places) != len(targets) or (positions is None and len(read) != len(targets)):
                continue
            places = places[counted]
            if int(places.max()) >= len(read):
                continue
            given, others = read[places], torch.ones_like(read, dtype=torch.bool)
            others[places] = False
            same = int((given == targets[counted]).sum())
            if same < SHARE * len(places) or len(given.unique()) < LEAST_STEPS:
                continue
            if len(places) <= MOST_COUNTED * len(read) and len(read[others].unique()) >= LEAST_STEPS:
                return Copied(embedding, "masked")
            if any(_is_causal(each, tokens.shape[1]) for each in nodes):
                return Copied(embedding, "causal")
    return None


def _weights_of_positions(nodes: list[Any], picks: Any, positions: int) -> Iterator[Tensor]:
    """Yield what an unreduced loss is multiplied by at each position."""
    for node in nodes if getattr(picks, "_saved_reduction", None) == NONE else ():
        if node.name().startswith("MulBackward"):
            for (before, _), name in zip(node.next_functions, ("self", "other"), strict=False):
                weights = saved_tensor(node, name) if before is None else None
                if weights is not None and weights.is_cpu and weights.numel() == positions:
                    yield weights.detach().reshape(-1)


def _chosen(node: Any) -> tuple[Any, Tensor | None]:
    """Return the node of all predictions, and the positions of those that a mask has chosen of them, if one has."""
    start = node
    while node is not None and node.name().startswith((*MOVED, "LogSoftmaxBackward")):
        node = node.next_functions[0][0]
    given = node.next_functions[0] if node is not None and node.name().startswith("IndexBackward") else (None, 0)
    indices = saved_tensors(node, "indices") if given[0] is not None else []
    if len(indices) != 1 or not indices[0].is_cpu:
        return start, None
    (index,) = indices
    if index.dtype == torch.bool:
        return given[0], index.reshape(-1).nonzero().squeeze(1)
    return (given[0], index) if index.dim() == 1 and len(shape_of(*given) or ()) == 2 else (start, None)


def _read_in_place(node: Any) -> Iterator[Any]:
    """Yield the embeddings that are read at the positions at which a node gives values."""
    pending, seen = [node], set[Any]()
    while pending and len(seen) < MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, given, shape = node.name().rstrip("0123456789"), node.next_functions, shape_of(node, 0)
        if name == "EmbeddingBackward":
            yield node
        elif name in LINEAR and len(given) > LINEAR[name]:
            pending.append(given[LINEAR[name]][0])
        elif node.name().startswith((*MOVED, *RECURRENT)):
            pending.append(given[0][0])
        elif node.name().startswith(SAME) or _keeps_positions(node):
            pending += [each for each, number in given if each is not None and shape_of(each, number) == shape]


def _keeps_positions(node: Any) -> bool:
    """Whether a product leaves no position out: it scales, drops single values, or is that of two results."""
    if not node.name().startswith(("MulBackward", "DivBackward")):
        return False
    for (before, _), name in zip(node.next_functions, ("self", "other"), strict=False):
        factor = saved_tensor(node, name) if before is None else None
        if before is None and (factor is None or not factor.is_cpu or not bool(_any_of_row(factor).all())):
            return False
    return True


def _any_of_row(factor: Tensor) -> Tensor:
    return factor != 0 if factor.dim() < 2 else (factor != 0).any(dim=-1)


def _is_causal(node: Any, steps: int) -> bool:
    """Whether an operation is attention that sees earlier positions only."""
    name, shape = node.name(), shape_of(node, 0)
    if shape is None:
        return False
    if name.startswith(KERNELS) and len(shape) == 4 and shape[2] == steps:
        if getattr(node, "_saved_is_causal", False):
            return True
        mask = saved_tensor(node, "attn_mask")
        if mask is None or not mask.is_cpu or mask.dim() < 2 or mask.shape[-1] != steps:
            return False
        allowed = mask if mask.dtype == torch.bool else mask > -1e3
        return not bool(allowed.expand(*shape[:2], steps, steps)[0, 0].triu(1).any())
    if not name.startswith(SOFTMAX) or len(shape) < 3 or shape[-2:] != (steps, steps):
        return False
    weights = saved_tensor(node, "result")
    if weights is None or not weights.is_cpu or signed(node._saved_dim, len(shape)) != len(shape) - 1:
        return False
    first = weights.detach().flatten(0, -3)[0]
    return not bool((first > 0).triu(1).any()) and bool((first > 0).tril(-1).any())
