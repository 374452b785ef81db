"""Losses over the wrong values, read from their graph: over ignored positions, or normalised outputs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, own_files
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, call_name, free_names, nodes_of, root_name, tree_of
from ampwise.watch.graph_lines import GraphLines, line_of
from ampwise.watch.inspection import ARITHMETIC, AVERAGING, MOVING, saved_tensor
from ampwise.watch.learning import CountedCalls, DilutedMean, Learning
from ampwise.watch.sample_axis import shape_of
from ampwise.watch.term_signs import wrong_sign

__all__ = [
    "assignment_of_loss",
    "note_diluted_mean",
    "note_sign",
    "note_sign_of_terms",
    "note_unreachable_target",
    "note_wrong_normalisation",
    "terms_of",
]

LONGEST = 16  # nodes
COMPARING = tuple(f"{kind}LossBackward" for kind in ("Mse", "L1", "SmoothL1", "Huber"))
BENDING = tuple(f"{kind}Backward" for kind in ("Pow", "Abs", "Sum", "Square", "Sqrt", "Log", "Cosh", "Clamp", "Where"))
SCALING = tuple(f"{kind}Backward" for kind in ("Add", "Sub", "Mul", "Div"))
LEAST = 0.05  # share of ignored positions
NONE = 0  # the value of reduction="none" in torch's loss nodes
# Loss nodes that normalise by themselves, and what makes probabilities.
NORMALISING = ("LogSoftmaxBackward", "BinaryCrossEntropyWithLogitsBackward")
PROBABILITIES = ("SoftmaxBackward", "SigmoidBackward")
LOGITS = "BinaryCrossEntropyWithLogitsBackward"
LOGARITHMS = ("NllLoss", "CtcLoss")  # losses that take logarithms
RANGES = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, float("inf"))}
MARGIN = 0.05  # what noise may add
LEAST_OUTSIDE = 0.25  # share of the targets
LINEAR = tuple(f"{kind}Backward" for kind in ("Addmm", "Mm", "Bmm", "Convolution"))  # their outputs have any size
PASSED_ON = (*MOVING, *(f"{kind}Backward" for kind in ("Index", "Slice", "Select", "Permute", "Transpose")))
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
    target = saved_tensor(node, "target")
    if not has_mean or getattr(node, "_saved_reduction", None) != NONE or target is None or not target.is_cpu:
        return  # on a GPU counting would sync
    ignored = int((target == node._saved_ignore_index).sum())  # type: ignore[union-attr]
    if ignored >= LEAST * target.numel():
        site = _line_of_loss(calling_site())
        mean = facts.diluted.setdefault(site, DilutedMean(step=step, positions=target.numel(), ignored=ignored))
        mean.times += 1


def terms_of(node: Any) -> Iterator[Any]:
    """Yield the nodes of a sum of losses, or of the only one."""
    pending = [node]
    for _ in range(LONGEST):
        each = pending.pop() if pending else None
        if each is None:
            return
        before = [one for one, _ in each.next_functions if one is not None]
        if each.name().startswith((*SCALING, *MOVING)) and shape_of(each, 0) == ():
            pending += before
        else:
            yield each


def _count(
    known: dict[CallSite, CountedCalls], site: CallSite, node: Any, lines: GraphLines, first: CountedCalls
) -> None:
    """Count a loss once more, and find the line of the operation in it."""
    calls = known.setdefault(site, first)
    calls.times += 1
    calls.at = calls.at or line_of(node)
    if calls.at is None:
        lines.request()


def note_wrong_normalisation(loss: Tensor, facts: Learning, step: int, lines: GraphLines) -> None:
    """Note a cross entropy, which takes logits, of the output of a softmax or a sigmoid, and one without a logarithm.

    ``nll_loss`` takes the logarithms of probabilities.
    """
    pending: list[Any] = [loss.grad_fn]
    for _ in range(2 * LONGEST):
        if not pending:
            return
        node = pending.pop()
        name = node.name()
        product = _product_in_divergence(node)
        if product is not None:
            node, name = product, "NllLoss"
        takes_logarithms = name.startswith(LOGARITHMS)
        takes_probabilities = name.startswith("BinaryCrossEntropyBackward")
        takes_any = takes_logarithms or takes_probabilities or name.startswith(NORMALISING)
        given = node.next_functions[0][0] if takes_any else None
        given = _past_moves(given)
        if takes_probabilities:  # of a sigmoid of probabilities
            is_sigmoid = given is not None and given.name().startswith("SigmoidBackward")
            given = _past_moves(given.next_functions[0][0]) if is_sigmoid else None
        is_probability = given is not None and given.name().startswith(PROBABILITIES)
        if given is not None and (is_probability or (takes_logarithms and given.name().startswith(LINEAR))):
            what = given.name().partition("Backward")[0].lower() if is_probability else "layer without a softmax"
            only = None if takes_logarithms else _only_call_of(what)
            first = CountedCalls(step=step, what=what, at=only)
            known, at = (facts.unlogged, node) if takes_logarithms else (facts.normalised, given)
            _count(known, only or assignment_of_loss(calling_site()), at, lines, first)
            return
        if name.startswith((*ARITHMETIC, *MOVING, *AVERAGING, *LOGARITHMS, "SumBackward")):
            pending += [each for each, _ in node.next_functions if each is not None]


def note_sign(loss: Tensor, facts: Learning, step: int) -> None:
    """Note whether a loss that is a likelihood of classes, and nothing else, has the right sign."""
    node, sign = loss.grad_fn, 1
    for _ in range(LONGEST):
        if node is None:
            return
        name = node.name()
        is_picked = name.startswith(("GatherBackward", "IndexBackward"))
        if is_picked and not _is_log_softmax(node.next_functions[0][0]):
            return
        if name.startswith("NllLossBackward") or is_picked:
            break
        before = [each for each, _ in node.next_functions if each is not None]
        known = (*MOVING, *AVERAGING, "SumBackward", "NegBackward")
        if len(before) != 1 or not name.startswith(known):
            return
        node, sign = before[0], -sign if name.startswith("NegBackward") else sign
    else:
        return
    if is_picked == (sign < 0):
        facts.minimised += 1
        return
    what = "the mean of log-probabilities, without a minus" if is_picked else "a negative cross entropy"
    site = assignment_of_loss(calling_site())
    facts.maximised.setdefault(site, CountedCalls(step=step, what=what)).times += 1


def note_sign_of_terms(loss: Tensor, facts: Learning, step: int, lines: GraphLines) -> None:
    """Note a term of a loss that has the wrong sign."""
    found = wrong_sign(loss.grad_fn)
    if found is not None:
        node, what = found
        _count(facts.wrong_terms, assignment_of_loss(calling_site()), node, lines, CountedCalls(step=step, what=what))


def _is_log_softmax(node: Any) -> bool:
    while node is not None and node.name().startswith(PASSED_ON):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("LogSoftmaxBackward")


def note_unreachable_target(loss: Tensor, facts: Learning, step: int, lines: GraphLines) -> None:
    """Note a loss many of whose targets are outside of what the last activation gives, or the loss itself takes."""
    for term in terms_of(loss.grad_fn):
        node = term
        for _ in range(LONGEST):
            before = [each for each, _ in node.next_functions if each is not None]
            if node.name().startswith((*COMPARING, LOGITS)) or len(before) != 1:
                break
            node = before[0] if node.name().startswith((*ARITHMETIC, *MOVING, *AVERAGING)) else node
        found = _out_of_reach(node)
        if found:
            site = assignment_of_loss(calling_site())
            _count(facts.unreachable, site, node, lines, CountedCalls(step=step, what=found))
            return


def _out_of_reach(node: Any) -> str:
    """Say which targets of a loss node cannot be reached; empty if that is unclear, or these are few."""
    if getattr(node, "_saved_reduction", NONE) == NONE or saved_tensor(node, "weight") is not None:
        return ""  # some may be left out
    target = saved_tensor(node, "target")
    if target is None or not target.is_cpu or not target.is_floating_point() or not target.numel():
        return ""  # on a GPU counting would sync
    if node.name().startswith(LOGITS):
        low, high = float(target.min()), float(target.max())
        if low >= -1e-6 and high <= 1 + 1e-6:
            return _below_half(node, target)
        return f"targets go from {low:.4g} to {high:.4g}, and a binary cross entropy takes those between 0 and 1"
    given = _past_moves(node.next_functions[0][0]) if node.name().startswith(COMPARING) else None
    name = "" if given is None else given.name().partition("Backward")[0]
    if name not in RANGES:
        return ""
    low, high = RANGES[name]
    outside = float(((target < low - MARGIN) | (target > high + MARGIN)).float().mean())
    if outside < LEAST_OUTSIDE:
        return ""
    return (
        f"{outside:.0%} of the targets, which go from {float(target.min()):.4g} to {float(target.max()):.4g}, are "
        f"outside of what {name.lower()} gives"
    )


def _past_moves(node: Any) -> Any:
    """Return the node that has computed values that others have only moved."""
    while node is not None and node.name().startswith(PASSED_ON):
        node = node.next_functions[0][0]
    return node


def _below_half(node: Any, target: Tensor) -> str:
    """Say which targets of a binary cross entropy are below what logits that are never negative give: 0.5."""
    given = _past_moves(node.next_functions[0][0])
    share = float((target < 0.5 - MARGIN).float().mean())
    if given is None or not given.name().startswith("ReluBackward") or share < LEAST_OUTSIDE:
        return ""
    return f"{share:.0%} of the targets are below 0.5, and logits after a relu are never negative: their sigmoid is not"


def _product_in_divergence(node: Any) -> Any:
    """Return the product of targets and inputs in ``kl_div``, which subtracts it from a constant of the same shape."""
    given = node.next_functions
    if not node.name().startswith("SubBackward") or len(given) != 2 or given[0][0] is not None or given[1][0] is None:
        return None
    product, shape = given[1][0], shape_of(node, 0)
    is_product = product.name().startswith("MulBackward") and product.next_functions[0][0] is None and bool(shape)
    softmax = product.next_functions[-1][0] if is_product else None
    if softmax is None or not softmax.name().startswith("SoftmaxBackward") or shape_of(softmax, 0) != shape:
        return None
    return _OnlyInput(softmax)


class _OnlyInput:
    """Stands for a loss node that takes one input."""

    def __init__(self, given: Any) -> None:
        self.next_functions = ((given, 0),)
        self.metadata: dict[str, Any] = given.metadata

    def name(self) -> str:
        return "NllLossBackward"


def _only_call_of(name: str) -> CallSite | None:
    """Return the only line that calls a function, or else makes a module, of this name: in the file of the loss, or
    else in all of the script's own code."""
    here = calling_site().file or ""
    for files in ([here], [file for file in own_files() if file != here]):
        calls = [
            (call_name(node), CallSite(file=file, line=node.lineno))
            for file in files
            for node in nodes_of(file)
            if isinstance(node, ast.Call) and call_name(node).lower() == name
        ]
        found = [site for called, site in calls if called == name] or [site for _, site in calls]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def assignment_of_loss(backward: CallSite) -> CallSite:
    """Return the line that assigned what is called ``backward`` on: the last one before it in the same function."""
    tree = None if backward.file is None or backward.line is None else tree_of(backward.file)
    if tree is None or backward.line is None:
        return backward
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    around = [each for each in functions if each.lineno <= backward.line <= (each.end_lineno or 0)]
    inner: ast.AST = max(around, key=lambda each: each.lineno) if around else tree
    here = [node for node in ast.walk(inner) if isinstance(node, ast.Call) and node.lineno == backward.line]
    names = {root_name(node.func) for node in here if call_name(node) == "backward"} - {None}
    made = [
        node
        for node in ast.walk(inner)
        if isinstance(node, ast.Assign) and node.lineno <= backward.line and bound_names(node) & names
    ]
    first = [node for node in made if not free_names(node) & names]  # not `loss = loss / 4`
    return backward if not first else CallSite(file=backward.file, line=max(each.lineno for each in first))


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
