"""Losses over all pairs of samples by mistake: values of shape (n) meet others of shape (n, 1), and give (n, n).

Read from the graph of the loss: the operation that makes a square of the values of n samples, all of which is averaged.
Values without a graph, as advantages have, are recognised by their numbers: in the squares that a broadcast makes, all
rows are the same values, scaled and shifted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.trace.names_in_code import call_name, free_names, functions_of
from ampwise.watch.cut_terms import value_of
from ampwise.watch.graph_lines import GraphLines, line_of
from ampwise.watch.inspection import ARITHMETIC, AVERAGING, MOVING, saved_tensor
from ampwise.watch.learning import CountedCalls, Learning
from ampwise.watch.loss_means import BENDING, COMPARING, LONGEST, assignment_of_loss, terms_of
from ampwise.watch.sample_axis import operations_along, shape_of

__all__ = ["CrossedLosses"]

MULTIPLYING = ("MulBackward", "DivBackward")
CROSSING = (*MULTIPLYING, "AddBackward", "SubBackward")
# Of an outer product these make nothing but a product of means, or the smaller of two: no one wants that.
PLAIN = (*ARITHMETIC, *MOVING, *AVERAGING, "SumBackward", "MinimumBackward", "MaximumBackward")
BENT = tuple(f"{kind}Backward" for kind in ("Exp", "Relu", "Softplus", "LogSigmoid", "ClampMin", "ClampMax", "Tanh"))
POINTWISE = (*PLAIN, *BENDING, *BENT)
LAYERS = tuple(f"{kind}Backward" for kind in ("Addmm", "Mm", "Convolution", "MkldnnRnnLayer", "CudnnRnn"))
JOINING = ("StackBackward", "CatBackward")
INDEXING = ("IndexBackward",)
RESHAPING = ("UnsqueezeBackward", "ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward")
# What makes the shape of an outer product in the script.
OUTER = (
    *("unsqueeze", "unsqueeze_", "view", "reshape", "expand", "expand_as", "repeat", "transpose", "permute", "t"),
    *("outer", "ger", "meshgrid", "broadcast_to", "rearrange", "expand_dims", "cdist", "einsum"),
)
SAME_SHAPE = ("detach", "clone", "float", "double", "to", "cpu", "contiguous", "exp", "log", "abs", "clamp")
MOST_NODES = 8 * LONGEST
MOST_ROWS = 32  # of a square of values that are compared
LEAST_SAMPLES = 4
TOLERANCE = 1e-4  # of the largest value
MOST_DEPTH = 6  # names that are followed


@dataclass(slots=True)
class _Crossing:
    """An operation that makes a square of the values of samples."""

    node: Any
    what: str
    is_plain: bool = True  # between it and the loss there is nothing but sums, products and means
    reshaped: bool = False  # the other operand was made from one of shape (n)
    samples: int = 0  # if it is given values that were squared before, without a graph


class CrossedLosses:
    """Look for losses over all pairs of samples."""

    def __init__(self, facts: Learning, lines: GraphLines) -> None:
        self._facts, self._lines = facts, lines
        self._meant: set[tuple[CallSite, str]] = set()  # terms of losses over pairs on purpose

    def look(self, loss: Tensor, step: int, frame: FrameType | None) -> None:
        """Note a loss that is about to be differentiated, with a term over all pairs. frame: it is called there."""
        for term in terms_of(loss.grad_fn):
            compared = _compared(term)
            found = compared or _combined(term)
            if found is None:
                continue
            site = assignment_of_loss(calling_site())
            if (site, found.what) in self._meant:
                continue
            known, line = self._facts.crossed.get(site), line_of(found.node)
            if line is None and (known is None or known.at is None):
                self._lines.request()
            if known is None and compared is None:  # the script's text must not say that pairs are meant
                if line is None:
                    return
                if _is_meant(line, found):
                    self._meant.add((site, found.what))
                    continue
            known = self._facts.crossed.setdefault(site, CountedCalls(step=step, what=found.what))
            known.times += 1
            if known.at is None and line is not None:
                made_at = _squared_at(line, frame)
                known.at = made_at or line
                if made_at is not None and found.samples:
                    vectors = f"{(found.samples,)} and {(found.samples, 1)}"
                    known.what = _words(f"values of shape {vectors} are broadcast, and meet those of each sample")
            return


# A prediction and its target


def _compared(term: Any) -> _Crossing | None:
    """Return the operation that crosses predictions and targets in a term of the loss.

    All ways from the term back lead to the difference of the two; what the prediction is compared with is constant.
    What has one value for each prediction, as a predicted variance has, may be beside it.
    """
    pending: list[tuple[Any, Any]] = [(term, None)]  # with the loss function, whose inputs are expanded before
    seen, crossed = set[Any](), dict[Any, tuple[tuple[int, ...], tuple[int, ...]]]()
    beside = set[tuple[int, ...]]()  # shapes
    while pending and len(seen) < 2 * LONGEST:
        node, compares = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [each for each in node.next_functions if each[0] is not None]
        made, given = shape_of(node, 0), shape_of(*before[0]) if len(before) == 1 else None
        is_square = made is not None and len(made) == 2 and made[0] == made[1] > 1
        if is_square and given in ((made[0], 1), (made[0],)):  # type: ignore[index]
            target = saved_tensor(compares, "target")
            is_sub = node.name().startswith("Sub")
            is_expanded = target is not None and target.shape == made and 0 in target.stride()
            if not is_sub and not is_expanded and (target is None or target.shape != made or not _is_squared(target)):
                return None
            crossed[node] = (given, made)  # type: ignore[assignment]
            continue
        if node.name().startswith(COMPARING):
            compares = node
        elif not before or not node.name().startswith((*ARITHMETIC, *MOVING, *AVERAGING, *BENDING)):
            return None
        for each, number in before:
            shape = shape_of(each, number)
            if is_square and len(before) > 1 and shape in ((made[0], 1), (made[0],)):  # type: ignore[index]
                beside.add(shape)
            else:
                pending.append((each, compares))
    if pending or len(crossed) != 1:
        return None
    node, (given, made) = crossed.popitem()
    if beside - {given}:
        return None
    other = (made[0], 1) if len(given) == 1 else made[:1]
    return _Crossing(node, _words(f"prediction and target are broadcast from {given} and {other} to {made}"))


# Values of the samples that are multiplied, added or divided


class _Way(NamedTuple):
    """A node on the way from the loss back, and whether only sums, products and means follow it."""

    node: Any
    is_plain: bool


def _combined(term: Any) -> _Crossing | None:
    """Return the first operation that makes a square of the values of samples, if the term averages all of it.

    Anything else that has such a shape, such as a matmul, a softmax or a constant, speaks for pairs on purpose.
    """
    pending, seen = [_Way(term, is_plain=True)], set[Any]()
    found: list[_Crossing] = []
    while pending:
        node, is_plain = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        made = shape_of(node, 0)
        is_square = made is not None and len(made) == 2 and made[0] == made[1] >= LEAST_SAMPLES
        if len(seen) > MOST_NODES or made is None:
            return None
        if not node.name().startswith(POINTWISE):
            if is_square:
                return None
            continue
        is_plain &= node.name().startswith(PLAIN)
        given = [each for each in node.next_functions if each[0] is not None]
        if not is_square:
            is_reduced = len(made) < 2 and node.name().startswith((*ARITHMETIC, *MOVING, *AVERAGING, "SumBackward"))
            pending += [_Way(each, is_plain) for each, _ in given] if is_reduced else []
            continue
        crossing = _crossing_at(node, made, is_plain)
        if crossing is not None:
            found.append(crossing)
        elif any(each.shape == made and not _is_squared(each) for each in _constants(node)):
            return None
        pending += [_Way(each, is_plain) for each, number in given if shape_of(each, number) == made]
    return min(found, key=lambda each: each.node._sequence_nr()) if found else None


def _crossing_at(node: Any, made: tuple[int, ...], is_plain: bool) -> _Crossing | None:
    """Return what an operation crosses: values of shape (n) and (n, 1), or one of these and a square of constants."""
    if not node.name().startswith(CROSSING):
        return None
    vectors = {made[:1], (made[0], 1)}
    given = [(each, number, shape_of(each, number)) for each, number in node.next_functions if each is not None]
    own = [(each, number, shape) for each, number, shape in given if shape in vectors]
    constants = list(_constants(node))
    if not own or not any(_is_of_samples(each, number, made[0]) for each, number, _ in own):
        return None
    shapes = {*(shape for *_, shape in own), *(tuple(each.shape) for each in constants if tuple(each.shape) in vectors)}
    is_unknown = len(given) == 1 and not constants and not node.name().startswith(MULTIPLYING)
    of_square = [each for each in constants if tuple(each.shape) == made and _is_squared(each)]
    reshaped = any(len(shape or ()) == 2 and _is_reshaped(each, made[0]) for each, _, shape in own)
    if shapes == vectors or is_unknown:
        first, second = sorted(vectors, key=len)
        what = f"values of shape {first} and {second} are broadcast to {made}"
        return _Crossing(node, _words(what), is_plain, reshaped)
    if of_square:
        what = f"values of shape {own[0][2]} meet others of shape {made}, in which each row has the values of all"
        return _Crossing(node, _words(what), is_plain, reshaped, samples=made[0])
    return None


def _constants(node: Any) -> Iterator[Tensor]:
    """Yield the operands without a graph that a product or a quotient has saved."""
    for (before, _), name in zip(node.next_functions, ("self", "other"), strict=False):
        saved = saved_tensor(node, name) if before is None else None
        if saved is not None:
            yield saved


def _is_of_samples(node: Any, number: int, samples: int) -> bool:
    """Whether each of the values comes from a row of what a layer has made, or from a step of its own."""
    for each in operations_along(node, number, 0):
        name = each.node.name()
        if each.axis or each.shape[0] != samples:
            continue
        if name.startswith(LAYERS) or (name.startswith(JOINING) and len(each.node.next_functions) == samples):
            return True
        before, of = each.node.next_functions[0] if each.node.next_functions else (None, 0)
        if name.startswith(INDEXING) and len(each.shape) == 1 and before is not None:  # q[range(n), actions]
            shape = shape_of(before, of)
            if shape is not None and len(shape) == 2 and shape[0] == samples and _is_of_samples(before, of, samples):
                return True
    return False


def _is_reshaped(node: Any, samples: int) -> bool:
    """Whether values of shape (n, 1) were made from some of shape (n)."""
    given = node.next_functions[0] if node.name().startswith(RESHAPING) else (None, 0)
    return given[0] is not None and shape_of(*given) == (samples,)


def _is_squared(values: Tensor) -> bool:
    """Whether a square of values was made of two vectors: its rows, or its columns, differ by a factor and a shift."""
    if not values.is_cpu or not values.is_floating_point() or values.dim() != 2 or min(values.shape) < LEAST_SAMPLES:
        return False  # on a GPU comparing would sync
    part = values.detach()[:MOST_ROWS, :MOST_ROWS].double()
    scale = float(part.abs().max())
    rows, columns = (part - part[:, :1]), (part - part[:1])
    if not scale < float("inf") or not min(float(rows.abs().max()), float(columns.abs().max())) > 1e-3 * scale:
        return False  # the same values everywhere
    return any(_has_rank_one(each, TOLERANCE * scale) for each in (rows, columns))


def _has_rank_one(values: Tensor, tolerance: float) -> bool:
    at = int(values.abs().argmax())
    row, column = at // values.shape[1], at % values.shape[1]
    product = values[:, column : column + 1] * values[row : row + 1] / values[row, column]
    return float((values - product).abs().max()) <= tolerance


def _words(text: str) -> str:
    return text.replace(",)", ")")


# The text of the script


def _is_meant(line: CallSite, found: _Crossing) -> bool:
    """Whether the script makes the shape of an outer product where it combines the values.

    Pairs whose difference is bent, as in a ranking loss, are meant if that was done before, too.
    """
    function, statement = _statement_at(line)
    if statement is None:
        return True
    if any(_makes_outer(each) for each in ast.walk(statement)):
        return True
    if found.samples or (found.is_plain and found.node.name().startswith(MULTIPLYING)):
        return False
    return found.reshaped or any(_is_outer(value) for value in _values_of(free_names(statement), function))


def _makes_outer(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return call_name(node) in OUTER or any(word.arg in ("keepdim", "keepdims") for word in node.keywords)
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return any((isinstance(each, ast.Constant) and each.value is None) or _is_newaxis(each) for each in parts)
    return isinstance(node, ast.Attribute) and node.attr in ("T", "mT")


def _is_newaxis(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "newaxis"


def _is_outer(value: ast.expr) -> bool:
    """Whether an expression changes the shape of a value, and does nothing else with it afterwards."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and call_name(value) in SAME_SHAPE:
        value = value.func.value
    return _makes_outer(value)


@lru_cache(maxsize=64)
def _statement_at(line: CallSite) -> tuple[ast.AST | None, ast.stmt | None]:
    """Return the function and the statement of a line."""
    for function in functions_of(line.file or ""):  # the module's own code comes last
        inner = [
            each
            for part in function.body
            for each in ast.walk(part)
            if isinstance(each, ast.stmt) and each.lineno <= (line.line or 0) <= (each.end_lineno or 0)
        ]
        if inner and function.name == (line.function or function.name):
            return function, min(inner, key=lambda each: (each.end_lineno or 0) - each.lineno)
    return None, None


def _values_of(names: set[str], function: ast.AST | None) -> Iterator[ast.expr]:
    """Yield what a function assigns to some names."""
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id in names for each in node.targets
        ):
            yield node.value


def _squared_at(line: CallSite, frame: FrameType | None) -> CallSite | None:
    """Return the line where the square of constants was made that an operation is given; None if it is not known.

    Its function must still run, as its variables are read.
    """
    function, statement = _statement_at(line)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (line.file, line.function):
        frame = frame.f_back
    if frame is None or statement is None or function is None:
        return None
    values = {**frame.f_globals, **frame.f_locals}
    pending, seen = sorted(free_names(statement)), set[str]()
    while pending and len(seen) < MOST_DEPTH:
        name = pending.pop(0)
        value = values.get(name)
        if name in seen or not isinstance(value, Tensor) or value.requires_grad or not _is_of_square(value.shape):
            continue
        seen.add(name)
        samples = value.shape[0]
        for made in _values_of({name}, function):
            for node in ast.walk(made):
                if isinstance(node, ast.BinOp) and not any(map(_makes_outer, ast.walk(node))):
                    sides = {_shape_in(node.left, values), _shape_in(node.right, values)}
                    if sides == {(samples,), (samples, 1)}:
                        return CallSite(file=line.file, line=node.lineno, function=line.function)
            pending += sorted(free_names(made))
    return None


def _is_of_square(shape: torch.Size) -> bool:
    return len(shape) == 2 and shape[0] == shape[1]


def _shape_in(node: ast.expr, values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of an expression, without running code of the script; None where it is not known."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAME_SHAPE:
        return _shape_in(node.func.value, values)
    if isinstance(node, ast.UnaryOp):
        return _shape_in(node.operand, values)
    if isinstance(node, ast.BinOp):
        sides = [_shape_in(node.left, values), _shape_in(node.right, values)]
        known = [each for each in sides if each is not None]
        try:
            return tuple(torch.broadcast_shapes(*known)) if len(known) == 2 else None
        except RuntimeError:
            return None
    value = value_of(node, values)
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, int | float) else None
