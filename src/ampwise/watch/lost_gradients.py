"""Where the gradient of one parameter is lost in a backward pass: an operation makes it zero, or its parts cancel."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.watch.graph_lines import graph_nodes, line_of

__all__ = ["LostAt", "LostGradient"]

MOST_PAIRS = 2000  # of operations that are compared


class LostAt(NamedTuple):
    """The line where a gradient is lost. cancels: in a difference of two values that are computed in the same way."""

    site: CallSite
    cancels: bool


class LostGradient:
    """Watch the gradients on all ways from a loss that is about to be differentiated to one parameter."""

    def __init__(self, loss: Tensor, parameter: Tensor) -> None:
        users = defaultdict[Any, list[Any]](list)
        pending: list[Any] = []
        for node in graph_nodes(loss):
            pending += [node] if getattr(node, "variable", None) is parameter else []
            for before, _ in node.next_functions:
                users[before].append(node)
        leaf, self._leading = next(iter(pending), None), set[Any]()
        while pending:
            node = pending.pop()
            if node not in self._leading:
                self._leading.add(node)
                pending += users[node]
        self._zeroed_at = set[CallSite | None]()
        self._arrived = 0  # gradients that are not zero
        self._is_alive = False
        self._handles = [] if leaf is None else [leaf.register_prehook(self._sum)]
        for node in self._leading - {leaf}:
            ends = [before for before, _ in node.next_functions]
            ways = [at for at, before in enumerate(ends) if before in self._leading]
            # A hook that had the node would keep it, and with it the graph.
            look = partial(self._look, line_of(node), ways, len(ends), leaf in ends)
            self._handles.append(node.register_hook(look))

    def __bool__(self) -> bool:
        return bool(self._leading)

    def _look(self, site: CallSite | None, ways: list[int], count: int, is_last: bool, made: Any, given: Any) -> None:
        with suppress(Exception):  # it runs in the script's backward pass
            if not any(bool(each.any()) for each in given if isinstance(each, Tensor)):
                return
            found = [made[at] for at in ways] if len(made) == count else made
            if any(bool(each.any()) for each in found if isinstance(each, Tensor)):
                self._arrived += is_last
            else:
                self._zeroed_at.add(site)

    def _sum(self, given: Any) -> None:
        with suppress(Exception):
            self._is_alive |= any(bool(each.any()) for each in given if isinstance(each, Tensor))

    def end(self) -> LostAt | None:
        """Stop, after the pass. Return where the gradient was lost; None if it was not, or at several lines."""
        for each in self._handles:
            each.remove()
        sites, cancels = self._zeroed_at, False
        if not sites and self._arrived > 1:
            sites, cancels = {line_of(node) for node in self._leading if self._is_own_difference(node)}, True
        self._leading = set()
        site = next(iter(sites)) if len(sites) == 1 and not self._is_alive else None
        return None if site is None or (self._arrived and not cancels) else LostAt(site, cancels)

    def _is_own_difference(self, node: Any) -> bool:
        """Whether an operation subtracts two values that are computed by the same operations of the same parameters."""
        sides = [each for each, _ in node.next_functions]
        if not node.name().startswith("SubBackward") or len(sides) != 2 or not self._leading.issuperset(sides):
            return False
        pending, seen = [(sides[0], sides[1])], set[tuple[Any, Any]]()
        while pending:
            one, other = pending.pop()
            if one is other or (one, other) in seen:
                continue
            if one is None or other is None or one.name() != other.name() or len(seen) > MOST_PAIRS:
                return False
            if hasattr(one, "variable"):  # another parameter
                return False
            ends = [[each for each, _ in side.next_functions] for side in (one, other)]
            if len(ends[0]) != len(ends[1]):
                return False
            seen.add((one, other))
            pending += zip(*ends, strict=True)
        return bool(seen)
