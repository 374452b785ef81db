"""Language models that see the tokens that they are to predict: found in the graph of their loss.

An embedding keeps its tokens, and a cross entropy its targets: these are the next tokens. Attention keeps its mask, or
the weights that it gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampwise.watch.inspection import saved_tensor
from ampwise.watch.sample_axis import shape_of, signed

__all__ = ["attention_on_targets"]

MOST_NODES = 3000
LEAST_TOKENS = 32  # that are compared
SHARE = 0.9  # of the targets that are the next tokens
SHARE_SEEN = 0.75  # of the later positions
LEAST_STEPS = 4
MASKED = -1e3  # added to scores
SOFTMAX = ("SoftmaxBackward", "SafeSoftmaxBackward")
KERNELS = ("ScaledDotProduct",)
REVERSED = ("MkldnnRnnLayerBackward",)


def attention_on_targets(loss: Any, picks: Any) -> tuple[Any, str] | None:
    """Return an operation that lets each position see later ones, if the targets are the next tokens, and what it is.

    picks: the node in which the loss picks the target.
    """
    targets = saved_tensor(picks, "target")
    if targets is None or not targets.is_cpu or targets.is_floating_point():
        return None  # on a GPU comparing would sync
    ignored = getattr(picks, "_saved_ignore_index", -100)
    after = list(_nodes(loss, None))
    for embedding in (each for each in after if each.name().startswith("EmbeddingBackward")):
        tokens = saved_tensor(embedding, "indices")
        steps = None if tokens is None else _steps_ahead(tokens, targets, ignored)
        if steps is None:
            continue
        for node in _nodes(loss, steps):
            what = _sees_later(node, steps)
            if what and _reads_only(node, embedding):
                return node, what
    return None


def _nodes(root: Any, steps: int | None) -> Iterator[Any]:
    """Yield the nodes of a graph. steps: leave out what lies before a result that has no such axis, as a pooled one."""
    pending, seen = [root], set[Any]()
    while pending and len(seen) < MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        for before, number in node.next_functions:
            shape = None if before is None else shape_of(before, number)
            if before is not None and (steps is None or shape is None or any(not one % steps for one in shape if one)):
                pending.append(before)


def _steps_ahead(tokens: Tensor, targets: Tensor, ignored: int) -> int | None:
    """Return the length of the sequences of tokens if the targets are, at each position, the next token."""
    if tokens.dim() != 2 or min(tokens.shape) < 2 or len(set(tokens.shape)) < 2 or not tokens.is_cpu:
        return None
    for rows in (tokens, tokens.T):
        length = rows.shape[1]
        if length < LEAST_STEPS:
            continue
        for given in (length, length - 1):  # the last token has a target, or none
            if targets.numel() != rows.shape[0] * given:
                continue
            made = targets.reshape(rows.shape[0], given) if rows is tokens else targets.reshape(given, -1).T
            made, following, same = made[:, : length - 1], rows[:, 1:], rows[:, : length - 1]
            counted = made != ignored
            number = int(counted.sum())
            ahead, here = int((counted & (made == following)).sum()), int((counted & (made == same)).sum())
            if number >= LEAST_TOKENS and ahead >= SHARE * number > 2 * here:
                return length
    return None


def _sees_later(node: Any, steps: int) -> str:
    """Return what lets the first positions see all later ones: attention, an RNN in reverse; empty if nothing does."""
    name, shape = node.name(), shape_of(node, 0)
    if shape is None:
        return ""
    if name.startswith(REVERSED):
        is_along = len(shape) == 3 and shape[0] in (steps, steps - 1)
        return "RNN in both directions" if is_along and getattr(node, "_saved_reverse", False) else ""
    if name.startswith(SOFTMAX) and len(shape) >= 3 and shape[-1] == shape[-2] and shape[-1] in (steps, steps - 1):
        weights = saved_tensor(node, "result")
        if weights is None or signed(node._saved_dim, len(shape)) != len(shape) - 1:
            return ""
        return "attention" if _all_later(weights.detach().flatten(0, -3)[0] > 0) else ""
    if name.startswith(KERNELS) and len(shape) == 4 and shape[2] in (steps, steps - 1):
        key, mask = saved_tensor(node, "key"), saved_tensor(node, "attn_mask")
        if key is None or key.shape[2] != shape[2] or getattr(node, "_saved_is_causal", True):
            return ""
        if mask is None:
            return "attention"
        allowed = mask if mask.dtype == torch.bool else mask > MASKED
        whole = allowed.expand(*shape[:2], shape[2], shape[2])
        return "attention" if _all_later(whole.flatten(0, 1)[0]) else ""
    return ""


def _all_later(allowed: Tensor) -> bool:
    """Whether positions see later ones, except for those that none may see, such as padding.

    Weights may be so small that they are 0; with a causal mask, all of these are.
    """
    if not allowed.is_cpu:
        return False
    later = torch.ones_like(allowed, dtype=torch.bool).triu(1) & allowed.any(dim=0)
    return int(later.sum()) >= LEAST_STEPS and int((allowed & later).sum()) > SHARE_SEEN * int(later.sum())


def _reads_only(node: Any, embedding: Any) -> bool:
    """Whether an operation reads the tokens of an embedding and no other ones, apart from positions."""
    read = [each for each in _nodes(node, None) if each.name().startswith("EmbeddingBackward")]
    others = [saved_tensor(each, "indices") for each in read if each is not embedding]
    return embedding in read and all(
        each is not None and (each.dim() < 2 or bool((each == each[:1]).all())) for each in others
    )
