"""Mean losses that count the positions that their ``ignore_index`` leaves out, read from the graph of a loss."""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.trace.names_in_code import tree_of
from ampwise.watch.inspection import ARITHMETIC, MOVING
from ampwise.watch.learning import DilutedMean, Learning

__all__ = ["note_diluted_mean"]

LONGEST = 16  # nodes
LEAST = 0.05  # share of ignored positions
NONE = 0  # the value of reduction="none" in torch's loss nodes
LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")


def note_diluted_mean(loss: Tensor, facts: Learning, step: int) -> None:
    """Note a loss that is the mean over all positions of a cross entropy, although some of them are ignored."""
    node, has_mean = loss.grad_fn, False
    for _ in range(LONGEST):
        if node is None:
            return
        name = node.name()
        if name.startswith("NllLoss"):
            break
        before: list[Any] = [each for each, _ in node.next_functions if each is not None]
        is_mean = name.startswith("MeanBackward")
        if len(before) != 1 or not (is_mean or name.startswith(MOVING if has_mean else ARITHMETIC + MOVING)):
            return
        has_mean |= is_mean
        node = before[0]
    target = getattr(node, "_saved_target", None)
    if not has_mean or getattr(node, "_saved_reduction", None) != NONE or target is None or not target.is_cpu:
        return  # on a GPU counting would sync
    ignored = int((target == node._saved_ignore_index).sum())  # type: ignore[union-attr]
    if ignored >= LEAST * target.numel():
        site = _line_of_loss(calling_site())
        mean = facts.diluted.setdefault(site, DilutedMean(step=step, positions=target.numel(), ignored=ignored))
        mean.times += 1


def _line_of_loss(backward: CallSite) -> CallSite:
    """Return the only line of the file with an unreduced cross entropy, or else the backward pass."""
    tree = None if backward.file is None else tree_of(backward.file)
    if tree is None:
        return backward
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in LOSSES
        and any(each.arg == "reduction" and ast.unparse(each.value) == "'none'" for each in node.keywords)
    ]
    return CallSite(file=backward.file, line=found[0]) if len(found) == 1 else backward
