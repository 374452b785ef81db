"""Weights of the terms of a loss that are trained by an optimizer of their own, read from the graph of the loss."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from ampwise.watch.graph_lines import MOST_NODES, graph_nodes
from ampwise.watch.inspection import AVERAGING, MOVING, saved_tensor

__all__ = ["weights_of_terms"]

MOST_TERMS = 256
MOST_MOVES = 8  # operations between a weight and the product
SUMS = (*AVERAGING, *MOVING, "SumBackward", "AddBackward")
SIZES = ("AbsBackward", "SquareBackward", "MseLossBackward", "L1LossBackward", "SmoothL1LossBackward")  # never negative


def weights_of_terms(loss: Tensor) -> dict[int, Tensor]:
    """Return the parameters, by id, that only weigh terms which are never negative: the loss is smallest where they
    are 0.

    Such a term is ``(weight * error).square().mean()``, or has the weight beside the square.
    """
    found: dict[Any, Tensor] = {}
    uses = Counter[Any]()
    pending: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    for _ in range(MOST_TERMS):
        if not pending:
            break
        node, squared = pending.pop()
        if node is None:
            continue
        given = [each for each, _ in node.next_functions]
        name = node.name()
        if name.startswith(SUMS) and getattr(node, "_saved_alpha", 1) == 1:
            pending += [(each, squared) for each in given if not (squared and name.startswith("AddBackward"))]
        elif name.startswith(("PowBackward0", *SIZES[:2])):
            if _is_size(node):
                pending.append((given[0], True))
        elif name.startswith("MulBackward"):
            if len(given) < 2 or None in given:  # one that has no graph may be left out
                factor = next(
                    (each for kind in ("self", "other") if (each := saved_tensor(node, kind)) is not None), None
                )
                is_positive = factor is not None and factor.dim() == 0 and factor.is_cpu and float(factor) > 0
                pending += [(each, squared) for each in given if squared or is_positive]
                continue
            for leaf, other in (given, given[::-1]):
                weight = _leaf_of(leaf)
                if weight is not None and (squared or _is_size(other)):
                    found[weight] = weight.variable
                    uses[weight] += 1
    nodes = graph_nodes(loss) if found else []
    every = Counter(each for node in nodes for each, _ in node.next_functions if each in found)
    return (
        {}
        if len(nodes) >= MOST_NODES
        else {id(found[each]): found[each] for each in found if every[each] == uses[each]}
    )


def _is_size(node: Any) -> bool:
    """Whether the result of an operation is never negative."""
    if node.name().startswith("PowBackward0"):
        exponent = getattr(node, "_saved_exponent", None)
        return isinstance(exponent, int | float) and exponent > 0 and exponent % 2 == 0
    return bool(node.name().startswith(SIZES))


def _leaf_of(node: Any) -> Any:
    """Return the node of a parameter that was only moved; None if it is something else."""
    for _ in range(MOST_MOVES):
        if node is None or hasattr(node, "variable"):
            return node
        if not node.name().startswith((*MOVING, "ExpandBackward", "SliceBackward", "IndexBackward")):
            return None
        node = node.next_functions[0][0]
    return None
