"""Terms of a loss whose sign is wrong, whatever the data: the divergence of a VAE, and the entropy of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ampwise.watch.inspection import AVERAGING, MOVING, saved_tensor

__all__ = ["wrong_sign"]

MOST_NODES = 64
PASSED = (*MOVING, *AVERAGING, "SumBackward", "SliceBackward", "ExpandBackward")


class _Leaf(NamedTuple):
    """A part of a loss that is no sum or multiple of others, and its sign."""

    node: Any
    sign: int
    joined: Any  # the sum that it is added in


def wrong_sign(loss: Any) -> tuple[Any, str] | None:
    """Return the operation of a term that has the wrong sign, and what it is."""
    leaves = list(_leaves(loss))
    return _divergence(leaves) or _entropy(leaves)


def _divergence(leaves: list[_Leaf]) -> tuple[Any, str] | None:
    """Find 1 + logvar - mean**2 - logvar.exp() where it is minimised: it has no lower bound."""
    signs = {each[:2] for each in leaves}
    squares = any(each.node.name().startswith("PowBackward") and each.sign < 0 for each in leaves)
    for node, sign, _ in leaves:
        if squares and sign < 0 and node.name().startswith("ExpBackward"):
            given = _past_moves(node.next_functions[0][0])
            if any((one, 1) in signs for one in (given, node.next_functions[0][0])):
                return node, "the divergence from a normal distribution, without its minus"
    return None


def _entropy(leaves: list[_Leaf]) -> tuple[Any, str] | None:
    """Find the entropy of a policy, or its estimate by the actions that were drawn, where it is minimised."""
    drawn = [_past_picks(each.node) for each in leaves if each.sign < 0 and _is_weighted_pick(each.node)]
    clipped = any(each.node.name().startswith("MinimumBackward") and each.sign < 0 for each in leaves)
    for node, sign, joined in leaves:
        if (drawn or clipped) and sign < 0 and node.name().startswith("MulBackward"):
            given = [_past_moves(each, "ClampBackward") for each, _ in node.next_functions]
            names = ["" if each is None else each.name() for each in given]
            logs = any(each.startswith(("LogSoftmaxBackward", "SubBackward", "LogBackward")) for each in names)
            if logs and any(each.startswith("SoftmaxBackward") for each in names):
                return joined, "the entropy of the policy, with a plus"
        if sign < 0 and node.name().startswith("GatherBackward") and node in drawn:
            return (
                joined,
                "the log-probability of the actions that were drawn, with a minus, beside the policy gradient",
            )
    return None


def _is_weighted_pick(node: Any) -> bool:
    """Whether a product is that of log-probabilities of drawn actions and of values without a graph."""
    return node.name().startswith("MulBackward") and _past_picks(node) is not None


def _past_picks(product: Any) -> Any:
    """Return the node that picks the log-probabilities in a product; None if there is none, or it has two graphs."""
    given = [each for each, _ in product.next_functions if each is not None]
    node = _past_moves(given[0]) if len(given) == 1 else None
    return node if node is not None and node.name().startswith("GatherBackward") else None


def _leaves(root: Any) -> Iterator[_Leaf]:
    pending, count = [_Leaf(root, 1, root)], 0
    while pending and count < MOST_NODES:
        (node, sign, joined), count = pending.pop(), count + 1
        if node is None:
            continue
        name, given = node.name(), [each for each, _ in node.next_functions]
        if name.startswith(("AddBackward", "SubBackward")):
            yield _Leaf(node, sign, joined)  # it may be what an operation beside it was given
            alpha = float(getattr(node, "_saved_alpha", 1)) * (-1 if name.startswith("Sub") else 1)
            signs = [sign, sign if alpha > 0 else -sign]
            pending += [_Leaf(*pair, node) for pair in zip(given, signs, strict=False)]
        elif name.startswith(("NegBackward", "RsubBackward")):
            pending += [_Leaf(each, -sign, joined) for each in given]
        elif name.startswith(("MulBackward", "DivBackward")) and (factor := _factor(node)) is not None:
            pending += [_Leaf(each, sign if factor > 0 else -sign, joined) for each in given]
        elif name.startswith(PASSED):
            yield _Leaf(node, sign, joined)
            pending += [_Leaf(each, sign, joined) for each in given]
        else:
            yield _Leaf(node, sign, joined)


def _factor(node: Any) -> float | None:
    """Return the number by which a node multiplies, or divides; None if it is 0, or no single number."""
    for name in ("other", "self"):
        value = saved_tensor(node, name)
        if value is not None and value.dim() == 0 and not value.requires_grad and value.is_cpu:
            return float(value) or None
    return None


def _past_moves(node: Any, *others: str) -> Any:
    """Return the node that has computed values that others have only moved."""
    while node is not None and node.name().startswith((*MOVING, *others)):
        node = node.next_functions[0][0]
    return node
