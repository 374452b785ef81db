"""Operations along the samples of a batch, which should not know of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, own_files, says
from ampwise.trace.names_in_code import call_name, nodes_of
from ampwise.watch.copied_targets import copied_targets
from ampwise.watch.graph_lines import GraphLines, call_before, is_of_torch, line_of, nodes_before
from ampwise.watch.inspection import ARITHMETIC, AVERAGING, MOVING, RECURRENT, saved_tensor
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.sample_axis import Along, operations_along, shape_of, signed
from ampwise.watch.seen_targets import attention_on_targets
from ampwise.watch.swapped_views import swapping_views

__all__ = ["MixedSamples"]

LOOKED_AT = 8  # backward passes
MOST_LABELS = 64  # of batches
LEAST_SAMPLES = 4  # in a batch
LONGEST = 32  # nodes from a loss to where it picks the right classes, and from a step of an RNN to the one before
MOST_NODES = 3000  # among which RNNs and attention are searched for
ATTENTION = ("ScaledDotProduct", "SafeSoftmax")  # the second one without a kernel that does all
RNNS = ("LSTM", "GRU", "RNN")
ATTENTIONS = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")
COMPARING = tuple(
    f"{kind}Backward" for kind in ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits")
)
SOFTMAX = ("SoftmaxBackward", "LogSoftmaxBackward")


class MixedSamples:
    """Look in the graph of a loss for a softmax, a recurrence or attention along the axis of the samples."""

    def __init__(self, facts: Learning, lines: GraphLines) -> None:
        self._facts, self._lines = facts, lines
        self._looked = 0

    def look(self, loss: Tensor, step: int, batches: set[int]) -> None:
        """Look at a loss that is about to be differentiated. batches: sizes of the batches that data loaders give."""
        self._looked += 1
        self._note_labels(loss)
        if self._looked > LOOKED_AT:
            return
        for node, what in swapping_views(loss):
            known = self._facts.scrambled.setdefault(what, CountedCalls(step=step, what=what))
            known.times, known.at = known.times + 1, known.at or (None if is_of_torch(node) else line_of(node))
            if known.at is None:
                self._lines.request()
        self._look_for_targets(loss, step)
        for node, what in {
            **_after_loss(loss.grad_fn, batches),
            **_after_convolution(loss.grad_fn),
            **_after_rnn(loss.grad_fn),
        }.items():
            key = (what, calling_site())
            known = self._facts.mixed.setdefault(key, CountedCalls(step=step, what=what))
            known.times += 1
            known.at = known.at or _line_that_makes(what) or line_of(node)
            if known.at is None:
                self._lines.request()

    def _note_labels(self, loss: Tensor) -> None:
        """Note the label of a batch whose samples all have the same one; -1 if they have several."""
        picks = _picking(loss.grad_fn) if len(self._facts.labels) < MOST_LABELS else None
        targets = None if picks is None else saved_tensor(picks, "target")
        if targets is not None and targets.is_cpu and targets.dim() == 1 and len(targets) >= LEAST_SAMPLES:
            first = int(targets[0])
            self._facts.labels.append(first if bool((targets == first).all()) else -1)

    def _look_for_targets(self, loss: Tensor, step: int) -> None:
        """Note a model that sees the tokens that it is to predict: the next ones, or those at the same positions."""
        picks = _picking(loss.grad_fn, ("NllLossBackward", "NllLoss2DBackward"))
        found = None if picks is None else attention_on_targets(loss.grad_fn, picks)
        copied = None if picks is None or found is not None else copied_targets(loss, picks)
        if found is not None:
            (node, what), every = found, self._facts.seen_targets
            line = line_of(node)
        elif copied is not None:
            what, every = copied.what, self._facts.copied_targets
            line = call_before(copied.embedding, picks) if what == "masked" else line_of(picks)
        else:
            return
        known = every.setdefault(calling_site(), CountedCalls(step=step, what=what))
        known.times, known.at = known.times + 1, known.at or line
        if known.at is None:
            self._lines.request()


def _after_loss(node: Any, batches: set[int]) -> dict[Any, str]:
    """Return operations along the samples that a loss tells: it has predictions for each of them."""
    picks = _picking(node)
    compares = None if picks is not None else _picking(node, COMPARING)
    made_from = picks if picks is not None else compares
    logits, number = (None, 0) if made_from is None else made_from.next_functions[0]
    shape = None if logits is None else shape_of(logits, number)
    if shape is None or len(shape) not in ((2,) if picks is not None else (1, 2)) or shape[0] < 2:
        return {}
    for each in operations_along(logits, number, 0):
        if compares is not None:  # predictions for each step, (steps, samples), have the samples in the second axis
            other = each.shape[1] if each.axis == 0 and len(each.shape) > 1 else each.shape[0]
            if shape[0] in batches and other not in shape[1:] and (kind := _sequence_along(each)):
                return {each.node: kind}
            continue
        if each.node.name().startswith(SOFTMAX) and signed(each.node._saved_dim, len(each.shape)) == each.axis:
            # The classes are the other axis. Elsewhere it must be sure that these are samples that a loader has drawn.
            if each.node is logits or shape[0] in batches:
                return {each.node: each.node.name().partition("Backward")[0]}
        elif shape[0] in batches and (kind := _sequence_along(each)):
            return {each.node: kind}
    return {}


def _after_convolution(node: Any) -> dict[Any, str]:
    """Return RNNs and attention whose steps are the samples of a convolution before them, which come first in it."""
    found: dict[Any, str] = {}
    for each in nodes_before(node, MOST_NODES):
        axis = 2 if each.name().startswith(ATTENTION) else 0 if each.name().startswith(RECURRENT) else None
        shape = shape_of(each, 0)
        if axis is None or shape is None or not (kind := _sequence_along(Along(each, axis, shape))):
            continue
        given, number = each.next_functions[0]
        along = operations_along(given, number, axis) if given is not None else iter(())
        if any(one.axis == 0 and one.node.name().startswith("ConvolutionBackward") for one in along):
            found[each] = kind
    return found


def _after_rnn(node: Any) -> dict[Any, str]:
    """Return a softmax over the sequences of an RNN, of several values for each of its steps: those are the classes."""
    for each in nodes_before(node, MOST_NODES):
        shape = shape_of(each, 0)
        if shape is None or len(shape) != 3 or not each.name().startswith(SOFTMAX) or min(shape) < 2:
            continue
        axis = signed(each._saved_dim, 3)
        given, number = each.next_functions[0]
        for one in operations_along(given, number, axis) if axis < 2 and given is not None else ():
            if one.node.name().startswith(RECURRENT) and len(one.shape) == 3 and one.axis == _axis_of_samples(one.node):
                return {each: each.name().partition("Backward")[0]}
    return {}


def _axis_of_samples(rnn: Any) -> int:
    """Return which axis of what a layer of an RNN gives is that of its sequences."""
    is_first = getattr(rnn, "_saved_batch_first", False) and not rnn.name().startswith("Mkldnn")
    return 0 if is_first else 1


def _sequence_along(along: Along) -> str:
    """Return what reads an axis as the steps of several sequences: an RNN or attention; empty if nothing does."""
    node, axis, shape = along
    name = node.name()
    if name.startswith(ATTENTION):
        return "attention" if axis == 2 and len(shape) == 4 and shape[0] > 1 and shape[2] > 1 else ""
    if axis or len(shape) != 3 or shape[1] < 2 or shape[0] < 2:
        return ""
    is_unrolled = name.startswith("StackBackward") and not signed(node._saved_dim, 3) and _is_recurrent(node)
    return "RNN" if name.startswith(RECURRENT) or is_unrolled else ""


def _is_recurrent(stack: Any) -> bool:
    """Whether each of the values in a stack is computed from the one before, or from the one after it."""
    (first, _), (second, _) = stack.next_functions[:2]
    return second in _ancestors(first) or first in _ancestors(second)


def _ancestors(node: Any) -> Iterator[Any]:
    pending, seen = [node], set[Any]()
    while pending and len(seen) < LONGEST:
        each = pending.pop(0)
        if each is not None and each not in seen:
            seen.add(each)
            yield each
            pending += [before for before, _ in each.next_functions]


def _picking(node: Any, kinds: tuple[str, ...] = ("NllLossBackward",)) -> Any:
    """Return the node in which a loss picks the value of the right class; None if there is none, or several.

    kinds: other nodes to search for.
    """
    pending, found = [node], []
    for _ in range(LONGEST):
        each = pending.pop() if pending else None
        if each is None:
            break
        if each.name().startswith(kinds):
            found.append(each)
        elif each.name().startswith((*ARITHMETIC, *MOVING, *AVERAGING, "SumBackward")):
            pending += [before for before, _ in each.next_functions if before is not None]
    return found[0] if len(found) == 1 else None


def _line_that_makes(what: str) -> CallSite | None:
    """Return the only line that makes such a module, or that calls such a function: in the file that runs, or else in
    all of the script's own code."""
    names = {"RNN": RNNS, "attention": ATTENTIONS, "Softmax": ("softmax", "Softmax")}.get(
        what, ("log_softmax", "LogSoftmax")
    )
    here = calling_site().file or ""
    for files in ([here], [file for file in own_files() if file != here]):
        found = {
            CallSite(file=file, line=node.lineno)
            for file in files
            if any(says(file, name) for name in names)
            for node in nodes_of(file)
            if isinstance(node, ast.Call) and call_name(node) in names
        }
        if found:
            return found.pop() if len(found) == 1 else None
    return None
