"""Lines of the operations in a loss's graph: torch notes them for a pass or two, once something asks for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner

__all__ = ["GraphLines", "call_before", "graph_nodes", "is_of_torch", "line_of", "nodes_before", "watch_for_zeros"]

MOST_REQUESTS = 6
PASSES = 3  # backward passes until torch stops noting lines, whether one was found or not
NOTED = "traceback_"  # the key under which torch's anomaly mode notes the stack of an operation
FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
MOST_NODES = 20_000


class GraphLines:
    """Torch's notes of lines, off except for a few passes. allowed: whether it may be on; it would recompile code."""

    def __init__(self, allowed: Callable[[], bool]) -> None:
        self._allowed = allowed
        self._requests = self._left = 0

    @property
    def on(self) -> bool:
        return self._left > 0

    def request(self) -> bool:
        """Begin to note lines, if that may still help. Return whether the next passes will have them."""
        if self.on:
            return True
        if self._requests >= MOST_REQUESTS or torch.is_anomaly_enabled() or not self._allowed():
            return False
        self._requests, self._left = self._requests + 1, PASSES
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # without its check for NaN
        return True

    def pass_ended(self) -> None:
        """Stop after a few passes."""
        if self.on:
            self._left -= 1
            if not self._left:
                self.stop()

    def stop(self) -> None:
        if self._requests and torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled():
            torch.autograd.set_detect_anomaly(False)
        self._left = 0


def line_of(node: Any) -> CallSite | None:
    """Return the script's line that ran the operation of a node; None if it was not noted."""
    return next(lines_of(node), None)


def lines_of(node: Any) -> Iterator[CallSite]:
    """Yield the script's line that ran the operation of a node, and then those that called its function, if noted."""
    for text in reversed(node.metadata.get(NOTED) or ()):
        frame = FRAME.search(text)
        if frame is not None and code_owner(frame[1]) == "own":
            yield CallSite(file=frame[1], line=int(frame[2]), function=frame[3])


def is_of_torch(node: Any) -> bool:
    """Whether torch's own code ran the operation of a node, as far as that was noted."""
    frame = FRAME.search(next(reversed(node.metadata.get(NOTED) or ("",))))
    return frame is not None and code_owner(frame[1]) == "passed"


def call_before(node: Any, other: Any) -> CallSite | None:
    """Return the line that ran the operation of a node, in the innermost function that has run another one, too."""
    ways = zip(reversed([*lines_of(node)]), reversed([*lines_of(other)]), strict=False)  # from the outermost call on
    return next((line for line, beside in ways if line != beside), None)


def watch_for_zeros(loss: Tensor, found: Callable[[CallSite], None]) -> None:
    """Call ``found`` with the line of the first operation of a backward pass that makes all of a gradient zero."""
    told: list[bool] = []

    def look(node: Any, given: Any, made: Any) -> None:
        after = [each for each in given if isinstance(each, Tensor)]
        if told or not after or not any(bool(each.any()) for each in made if isinstance(each, Tensor)):
            return
        if not any(bool(each.any()) for each in after) and (site := line_of(node)) is not None:
            told.append(True)
            found(site)

    for node in graph_nodes(loss):
        node.register_hook(lambda given, made, node=node: look(node, given, made))


def graph_nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of the graph of a loss, from the loss on; of a large one, the first MOST_NODES."""
    return list(nodes_before(loss.grad_fn))


def nodes_before(node: Any, most: int = MOST_NODES) -> Iterator[Any]:
    """Yield a node of a graph, and then those before it; of a large graph, the first ``most``."""
    pending, seen = [node], set[Any]()
    while pending and len(seen) < most:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [before for before, _ in node.next_functions]
