"""Targets that keep their graph where they are meant to be fixed: of a value of the next state, and advantages.

Read from the graph of a loss. A value is compared with rewards and a part of a later value of the same layers; or the
difference between returns and a value, which the loss makes small in another term, multiplies a log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampwise.trace.call_site import calling_site, says
from ampwise.watch.graph_lines import GraphLines, graph_nodes, line_of
from ampwise.watch.inspection import ARITHMETIC, AVERAGING, MOVING, saved_tensor
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.sample_axis import shape_of

__all__ = ["note_target_graph"]

LOSSES = ("MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "L1LossBackward")
SQUARES = ("PowBackward", "AbsBackward")
PICKING = tuple(f"{kind}Backward" for kind in ("Gather", "Index", "Select", "Max", "Amax", "Squeeze", "Minimum"))
CHOOSING = tuple(f"{kind}Backward" for kind in ("Gather", "LogSoftmax", "Logsumexp", "NllLoss"))  # of a log-probability
LINEAR = {"AddmmBackward": 2, "MmBackward": 1}  # and which input is the weights
DISCOUNTS = ("gamma", "discount", "GAMMA", "DISCOUNT")  # in the script
LEAST_DISCOUNT = 0.5
MOST_NODES = 48


def note_target_graph(loss: Tensor, facts: Learning, step: int, lines: GraphLines) -> None:
    """Note a loss that is about to be differentiated, with a target through which gradients flow."""
    nodes = graph_nodes(loss)
    compared = [pair for node in nodes if (pair := _sides(node)) is not None]
    found = next((each for pair in compared if (each := _later_value(pair)) is not None), None)
    what = "value"
    if found is not None and not any(says(calling_site().file or "", word) for word in DISCOUNTS):
        found = None
    if found is None:
        values = {each for pair in compared for side in pair for each in _origins(side, (*MOVING, "SqueezeBackward"))}
        found, what = next((node for node in nodes if _multiplies(node, values)), None), "advantage"
    if found is None:
        return
    calls = facts.target_graphs.setdefault((calling_site(), what), CountedCalls(step=step, what=what))
    calls.times, calls.at = calls.times + 1, calls.at or line_of(found)
    if calls.at is None:
        lines.request()


def _sides(node: Any) -> list[Any] | None:
    """Return the results with a graph that a loss, or the square of a difference, compares; None for other nodes."""
    if node.name().startswith(SQUARES):
        node = node.next_functions[0][0]
        if node is None or not node.name().startswith("SubBackward"):
            return None
    elif not node.name().startswith(LOSSES):
        return None
    return [each for each, _ in node.next_functions if each is not None]


def _later_value(sides: list[Any]) -> Any:
    """Return the sum of rewards and a discounted value, if one of the same layer is compared with it."""
    for value, target in (sides, reversed(sides)) if len(sides) == 2 else ():
        added = [each for each in _way(target, (*ARITHMETIC, *MOVING)) if _adds_constant(each)]
        scaled = [each for each in _way(target, (*ARITHMETIC, *MOVING)) if _discounts(each)]
        own = [*_layers(value, (*MOVING, *PICKING))]
        later = [*_layers(target, (*ARITHMETIC, *MOVING, *PICKING))]
        is_same = len(own) == len(later) == 1 and own[0] is not later[0] and _weights(own[0]) is _weights(later[0])
        if added and scaled and is_same and _weights(own[0]) is not None:
            return added[0]
    return None


def _multiplies(node: Any, values: set[Any]) -> bool:
    """Whether a product is that of log-probabilities and of what is computed from values that the loss compares."""
    if not node.name().startswith("MulBackward") or not values:
        return False
    sides = [each for each, _ in node.next_functions if each is not None]
    if len(sides) != 2 or not shape_of(node, 0):
        return False
    ways = [set(_way(side, (*ARITHMETIC, *MOVING, *AVERAGING, "SqueezeBackward"))) for side in sides]
    for gain, log in (ways, reversed(ways)):
        subtracts = any(each.name().startswith("SubBackward") for each in gain)
        if subtracts and gain & values and not log & values and any(each.name().startswith(CHOOSING) for each in log):
            return True
    return False


def _way(node: Any, passed: tuple[str, ...]) -> Iterator[Any]:
    """Yield a node and those before it, up to the first ones that are not of the kinds that are passed."""
    pending, seen = [node], set[Any]()
    while pending and len(seen) < MOST_NODES:
        node = pending.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node.name().startswith(passed):
            pending += [before for before, _ in node.next_functions]


def _origins(node: Any, passed: tuple[str, ...]) -> list[Any]:
    """Return what has computed a value that was only moved since, if a linear layer has."""
    last = [*_way(node, passed)][-1:]
    return [each for each in last if each.name().startswith(tuple(LINEAR))]


def _layers(node: Any, passed: tuple[str, ...]) -> Iterator[Any]:
    return (each for each in _way(node, passed) if each.name().startswith(tuple(LINEAR)))


def _weights(layer: Any) -> Any:
    """Return the parameter of a linear layer, as far as it is one."""
    node = layer.next_functions[LINEAR[layer.name().rstrip("0123456789")]][0]
    while node is not None and node.name().startswith(("TBackward", *MOVING)):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _adds_constant(node: Any) -> bool:
    given = [each for each, _ in node.next_functions]
    return node.name().startswith("AddBackward") and len(given) == 2 and None in given


def _discounts(node: Any) -> bool:
    """Whether a product is that with a number, as discounts are."""
    for (before, _), name in zip(node.next_functions, ("self", "other"), strict=False):
        factor = saved_tensor(node, name) if before is None and node.name().startswith("MulBackward") else None
        if factor is not None and factor.is_cpu and not factor.dim() and LEAST_DISCOUNT <= float(factor) < 1:
            return True
    return False
