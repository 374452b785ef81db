"""What a loss was made of, read off its autograd graph near the end."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Loss", "mark_scaled", "read_loss"]

MARK = "ampwise.scaled"
NEAR = 24  # nodes that are looked at, from the loss on
MEAN = 1  # what torch's losses have for the reduction "mean"
ARITHMETIC = ("MulBackward", "DivBackward", "AddBackward", "SubBackward", "NegBackward")
MOVING = ("ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "UnsafeViewBackward", "AliasBackward")
BY_HAND = 8.0  # a loss is multiplied by this at least, by someone who means it as a loss scale


@dataclass(frozen=True, slots=True)
class Loss:
    """What is known of a loss before its backward pass."""

    scaler: Any = None  # a reference to the GradScaler that has scaled it
    constant: float | None = None  # by hand
    is_mean: bool | None = None  # a mean of its batch, and nothing more; None: cannot tell

    @property
    def scaled(self) -> bool:
        return self.scaler is not None


def mark_scaled(outputs: Any, scaler: Any) -> None:
    """Leave a mark on what ``scaler.scale`` returned, which whatever is computed from it leads back to."""
    mark = weakref.ref(scaler)
    for tensor in _tensors(outputs):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[MARK] = mark


def read_loss(tensor: Tensor) -> Loss:
    """Look at the last operations of a loss; the marks of ``mark_scaled`` are found through arithmetic."""
    scaler, constant, ends = None, None, []
    for node in _near(tensor):
        if MARK in node.metadata:
            scaler = node.metadata[MARK]
        elif _name(node) == "MulBackward0":
            constant = constant or _constant(node)
        if not _is_arithmetic(node) and not _is_moving(node):
            ends.append(node)
    plain = not any(_is_arithmetic(node) and MARK not in node.metadata for node in _near(tensor))
    is_mean = _is_mean(ends[0]) if len(ends) == 1 and plain else (False if not plain else None)
    return Loss(scaler, constant if scaler is None else None, is_mean)


def _near(tensor: Tensor) -> Iterator[Any]:
    """The last node and those before it, as long as they only add, multiply or move."""
    seen: set[Any] = set()
    waiting: deque[Any] = deque([] if tensor.grad_fn is None else [tensor.grad_fn])
    while waiting and len(seen) < NEAR:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if _is_arithmetic(node) or _is_moving(node):
            waiting.extend(before for before, _ in node.next_functions if before is not None)


def _is_arithmetic(node: Any) -> bool:
    return _name(node).startswith(ARITHMETIC)


def _is_moving(node: Any) -> bool:
    return _name(node).startswith(MOVING)


def _name(node: Any) -> str:
    name: str = node.name()
    return name


def _is_mean(node: Any) -> bool | None:
    if _name(node).startswith("MeanBackward"):
        return True
    reduction = getattr(node, "_saved_reduction", None)
    return None if reduction is None else reduction == MEAN


def _constant(node: Any) -> float | None:
    """The number that a loss was multiplied by; None if it was not one, or a small one."""
    try:
        other = node._saved_other
    except RuntimeError:  # freed by an earlier backward pass
        return None
    # torch keeps a Python number as a tensor on the host; asking one on a device would wait.
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.dim() or other.requires_grad:
        return None
    with torch.no_grad():
        value = float(other)
    return value if value >= BY_HAND else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Iterable):
        for each in outputs:
            yield from _tensors(each)
