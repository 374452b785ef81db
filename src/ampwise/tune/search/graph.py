"""What the graph of a loss tells without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["before_softmax", "has_hidden_parts"]

SOFTMAX = re.compile(r"_?(Log)?Softmax|_?SafeSoftmax")
# What leaves logits logits: other shapes and types, a temperature, a mask, a sum or difference of two.
LOGITS_STILL = re.compile(
    r"(Unsafe)?View|Reshape|Transpose|T|Permute|Squeeze|Unsqueeze|Expand|Slice|Select|Clone|Alias|ToCopy|Mul|Div|Add|Sub"
    r"|MaskedFill|Where"
)
NAME = re.compile(r"(\w+?)Backward\d*$")


def before_softmax(loss: Tensor) -> Iterator[Any]:
    """The nodes of the graph whose results go into a softmax, as they are or little changed."""
    for softmax in filter(_is(SOFTMAX), _reached([loss.grad_fn], lambda node: True)):
        yield from _reached(_after(softmax), _is(LOGITS_STILL))


def has_hidden_parts(loss: Tensor) -> bool:
    """Whether a part of the graph is a checkpoint that makes its own, and so has no way to its parameters."""
    return any(map(_is(re.compile("CheckpointFunction")), _reached([loss.grad_fn], lambda node: True)))


def _reached(starts: Iterable[Any], goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes that one comes to, going on from those that say so."""
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
