"""What a loss was made of, read off its autograd graph near the end."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Loss", "mark_scaled", "read_losses"]

MARK = "ampwise.scaled"
NEAR = 32  # nodes that are looked at, from the loss on
MEAN = 1  # what torch's losses have for the reduction "mean"
ARITHMETIC = ("Mul", "Div", "Add", "Sub", "Neg")
MOVING = ("ToCopy", "Clone", "View", "Squeeze", "UnsafeView", "Alias", "Reshape", "Unsqueeze")
REDUCING = ("Mean", "Sum", "Stack", "Cat", "Select", "Index", "Expand", "Permute", "Unbind", "Slice")
BY_HAND = 64.0  # a loss is multiplied by this at least, by someone who means it as a loss scale


@dataclass(frozen=True, slots=True)
class Loss:
    """What is known of a loss before its backward pass."""

    scaler: Any = None  # a reference to the GradScaler that has scaled it
    partly: bool = False  # the loss has terms that no scaler has scaled, besides those that one has
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


def read_losses(roots: Sequence[Tensor]) -> Loss:
    """Look at the last operations of what a backward pass begins from."""
    every = [_read(root) for root in roots]
    scalers = [each.scaler for each in every if each.scaled]
    return Loss(
        scaler=scalers[0] if scalers else None,
        partly=bool(scalers) and (len(scalers) < len(every) or any(each.partly for each in every)),
        constant=every[0].constant if len(every) == 1 else None,
        is_mean=every[0].is_mean if len(every) == 1 else None,
    )


def _read(root: Tensor) -> Loss:
    marks, unmarked = _marks(root)
    chain = list(_chain(root))
    factors = [_constant(node) for node in chain if _is(node, ("Mul",)) and MARK not in node.metadata]
    untouched = not any(_is(node, ARITHMETIC) and MARK not in node.metadata for node in chain[:-1])
    return Loss(
        scaler=marks[0] if marks else None,
        partly=bool(marks) and unmarked,
        constant=None if marks else next((factor for factor in factors if factor is not None), None),
        is_mean=_is_mean(chain[-1]) if chain and untouched else False,
    )


def _marks(root: Tensor) -> tuple[list[Any], bool]:
    """The marks that the loss leads back to; and whether some term of it leads back to none."""
    marks, unmarked, seen = [], False, set[Any]()
    waiting: deque[Any] = deque([] if root.grad_fn is None else [root.grad_fn])
    while waiting and len(seen) < NEAR:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        if MARK in node.metadata:
            marks.append(node.metadata[MARK])
        elif _is(node, (*ARITHMETIC, *MOVING, *REDUCING)):
            waiting.extend(before for before, _ in node.next_functions if before is not None)
        else:
            unmarked = True
    return marks, unmarked


def _chain(root: Tensor) -> Iterator[Any]:
    """From the loss back, as long as there is one way to go and it only multiplies or moves."""
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
    """The number that a loss was multiplied by; None if it was not one, or a small one."""
    seen: list[float] = []

    def look(other: Tensor) -> Tensor:
        # torch keeps a Python number as a tensor on the host; asking one on a device would wait.
        if other.device.type == "cpu" and not other.dim() and not other.requires_grad:
            with torch.no_grad():
                seen.append(float(other))
        return other

    # Asking for what was saved would run a checkpointed forward pass again, or use up what someone's hooks keep. As it
    # is told to a hook of ours, it is only passed by; where there are such hooks, this is refused.
    with contextlib.suppress(RuntimeError, AttributeError):
        node._raw_saved_other.register_hooks(look, lambda other: other)
    return seen[0] if seen and seen[0] >= BY_HAND else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Iterable):
        for each in outputs:
            yield from _tensors(each)
