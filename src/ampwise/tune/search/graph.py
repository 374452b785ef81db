"""Inspect the graph of a loss without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["before_softmax", "has_hidden_parts"]

SOFTMAX = re.compile(r"_?(Log)?Softmax|_?SafeSoftmax")
# Operations that keep logits logits: shape, dtype, temperature, mask, sum or difference.
LOGITS_STILL = re.compile(
    r"(Unsafe)?View|Reshape|Transpose|T|Permute|Squeeze|Unsqueeze|Expand|Slice|Select|Clone|Alias|ToCopy|Mul|Div|Add|Sub"
    r"|MaskedFill|Where"
)
NAME = re.compile(r"(\w+?)Backward\d*$")


def before_softmax(loss: Tensor) -> Iterator[Any]:
    """Yield the graph nodes whose results go into a softmax, unchanged or nearly so."""
    for softmax in filter(_is(SOFTMAX), _reached([loss.grad_fn], lambda node: True)):
        yield from _reached(_after(softmax), _is(LOGITS_STILL))


def has_hidden_parts(loss: Tensor) -> bool:
    """Whether a part of the graph is a reentrant checkpoint, which hides the path to its parameters."""
    return any(map(_is(re.compile("CheckpointFunction")), _reached([loss.grad_fn], lambda node: True)))


def _reached(starts: Iterable[Any], goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the reachable nodes; ``goes_on`` says whether to continue from a node."""
    pending, seen = list(starts), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if goes_on(node):
            pending += _after(node)


def _after(node: Any) -> list[Any]:
    return [after for after, _ in node.next_functions]


def _is(kind: re.Pattern[str]) -> Callable[[Any], bool]:
    def test(node: Any) -> bool:
        name = NAME.match(node.name())
        return name is not None and kind.fullmatch(name[1]) is not None

    return test
