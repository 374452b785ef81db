"""How a loss was computed, read from the last nodes of its autograd graph."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["LossOrigin", "leaves_of", "mark_scaled", "read_losses"]

MARK = "ampwise.scaled"
NEAR = 32  # nodes to visit, starting from the loss
MOST_NODES = 256  # of a graph whose leaves are searched for
MEAN = 1  # the value of reduction="mean" in torch's loss nodes
ARITHMETIC = ("Mul", "Div", "Add", "Sub", "Neg")
MOVING = ("ToCopy", "Clone", "View", "Squeeze", "UnsafeView", "Alias", "Reshape", "Unsqueeze")
REDUCING = ("Mean", "Sum", "Stack", "Cat", "Select", "Index", "Expand", "Permute", "Unbind", "Slice")
LEAST_MANUAL_SCALE = 64.0  # a smaller factor on a loss is not taken for a loss scale


@dataclass(frozen=True, slots=True)
class LossOrigin:
    """Properties of a loss that its graph shows before the backward pass."""

    scaler: Any = None  # weak reference to the GradScaler that scaled it
    partly: bool = False  # some terms of the loss are scaled, and others are not
    constant: float | None = None  # a manual loss scale
    is_mean: bool | None = None  # the loss is the mean over its batch; None: unknown

    @property
    def scaled(self) -> bool:
        return self.scaler is not None


def mark_scaled(outputs: Any, scaler: Any) -> None:
    """Mark the graph nodes of what ``scaler.scale`` returned."""
    mark = weakref.ref(scaler)
    for tensor in _tensors(outputs):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[MARK] = mark


def read_losses(roots: Sequence[Tensor]) -> LossOrigin:
    """Read the last operations of the tensors that a backward pass starts from."""
    every = [_read(root) for root in roots]
    scalers = [each.scaler for each in every if each.scaled]
    return LossOrigin(
        scaler=scalers[0] if scalers else None,
        partly=bool(scalers) and (len(scalers) < len(every) or any(each.partly for each in every)),
        constant=every[0].constant if len(every) == 1 else None,
        is_mean=every[0].is_mean if len(every) == 1 else None,
    )


def leaves_of(roots: Iterable[Tensor]) -> set[int] | None:
    """Return ids of the leaf tensors that a backward pass reaches; None if the graph is large or not all visible."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = []
    for root in roots:
        if root.grad_fn is None:
            leaves.add(id(root))
        else:
            pending.append(root.grad_fn)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES or isinstance(node, BackwardCFunction):  # a function of Python may do anything
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        pending += [before for before, _ in node.next_functions]
    return leaves


def _read(root: Tensor) -> LossOrigin:
    marks, unmarked = _marks(root)
    chain = list(_chain(root))
    factors = [_constant(node) for node in chain if _is(node, ("Mul",)) and MARK not in node.metadata]
    untouched = not any(_is(node, ARITHMETIC) and MARK not in node.metadata for node in chain[:-1])
    return LossOrigin(
        scaler=marks[0] if marks else None,
        partly=bool(marks) and unmarked,
        constant=None if marks else next((factor for factor in factors if factor is not None), None),
        is_mean=_is_mean(chain[-1]) if chain and untouched else False,
    )


def _marks(root: Tensor) -> tuple[list[Any], bool]:
    """Return the marks that the loss leads back to, and whether some term of it leads back to none."""
    marks, unmarked, seen = [], False, set[Any]()
    pending: deque[Any] = deque([] if root.grad_fn is None else [root.grad_fn])
    while pending and len(seen) < NEAR:
        node = pending.popleft()
        if node in seen:
            continue
        seen.add(node)
        if MARK in node.metadata:
            marks.append(node.metadata[MARK])
        elif _is(node, (*ARITHMETIC, *MOVING, *REDUCING)):
            pending.extend(before for before, _ in node.next_functions if before is not None)
        else:
            unmarked = True
    return marks, unmarked


def _chain(root: Tensor) -> Iterator[Any]:
    """Yield nodes from the loss back, as long as there is one input and only arithmetic and copies."""
    node: Any = root.grad_fn
    while node is not None:
        yield node
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 and _is(node, (*ARITHMETIC, *MOVING)) else None


def _is(node: Any, kinds: Sequence[str]) -> bool:
    return str(node.name()).startswith(tuple(f"{kind}Backward" for kind in kinds))


def _is_mean(node: Any) -> bool | None:
    if _is(node, ("Mean",)):
        return True
    reduction = getattr(node, "_saved_reduction", None)
    return None if reduction is None else reduction == MEAN


def _constant(node: Any) -> float | None:
    """Return the number that a loss was multiplied by; None if there is none, or it is small."""
    seen: list[float] = []

    def look(other: Tensor) -> Tensor:
        # torch keeps a Python number as a CPU tensor; reading one on a device would sync.
        if other.device.type == "cpu" and not other.dim() and not other.requires_grad:
            with torch.no_grad():
                seen.append(float(other))
        return other

    # Unpacking a saved tensor would run a checkpointed forward pass again, or consume what saved-tensor hooks keep.
    # Registering a pack hook shows the tensor without unpacking it; torch refuses it where there are such hooks.
    with contextlib.suppress(RuntimeError, AttributeError):
        node._raw_saved_other.register_hooks(look, lambda other: other)
    return seen[0] if seen and seen[0] >= LEAST_MANUAL_SCALE else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Iterable):
        for each in outputs:
            yield from _tensors(each)
