"""Mistakes in a loss or a mask that the source of a function proves: a value compared with itself, an inverted mask."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site, own_files, says
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, call_name, functions_of, nodes_of, root_name
from ampwise.watch.graph_lines import GraphLines, graph_nodes, line_of
from ampwise.watch.learning import Learning

__all__ = ["SourceFaults"]

COMPARED, CONSTANT, INVERTED = "compared with itself", "a constant term", "inverted mask"
ATTENTIONS = (
    *("MultiheadAttention", "Transformer", "TransformerEncoder", "TransformerDecoder"),
    *("TransformerEncoderLayer", "TransformerDecoderLayer"),
)
COMPARISONS = ("kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
COMPARING_MODULES = ("KLDivLoss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
# What leaves the compared values the same, or makes probabilities of both.
TRANSPARENT = ("softmax", "log_softmax", "log", "exp", "float", "detach", "clone", "double", "contiguous")
PURE = (*TRANSPARENT, "sigmoid", "tanh", "relu", "view", "reshape", "flatten", "squeeze", "unsqueeze", "mean", "sum")
PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
TORCH = ("F", "f", "torch", "nn")  # modules
MOST_PHASES = 3  # of a script, for which lines are noted
MOST_DEPTH = 6  # names that are followed


class _Fault(NamedTuple):
    """A mistake, and the lines of the function that has it."""

    kind: str
    site: CallSite
    first: int  # of these, one must have an operation in the graph
    last: int
    constant: frozenset[int] = frozenset()  # lines that must have no operation in the graph


class _Body(NamedTuple):
    """What a function assigns: the only value of each name, and the names that it binds or changes otherwise."""

    values: dict[str, ast.expr]
    unclear: frozenset[str]


class SourceFaults:
    """Mistakes in the source of functions that have run: operations of theirs are in the graph of a loss."""

    def __init__(self, facts: Learning, lines: GraphLines) -> None:
        self._facts, self._lines = facts, lines
        self._left: list[_Fault] | None = None  # that are not known to have run
        self._asked: set[CallSite] = set()  # backward passes

    def look(self, loss: Tensor) -> None:
        """Look at a loss that is about to be differentiated."""
        if self._left is None:
            files = sorted({*own_files(), calling_site().file or ""})
            self._left = [fault for file in files for fault in _faults_in(file)]
        if not self._left:
            return
        if not self._lines.on:
            here = calling_site()
            if here not in self._asked and len(self._asked) < MOST_PHASES:  # functions of a second phase run later
                self._asked.add(here)
                self._lines.request()
            return
        ran = {(site.file, site.line or 0) for node in graph_nodes(loss) if (site := line_of(node)) is not None}
        for fault in list(self._left):
            in_graph = {line for file, line in ran if file == fault.site.file}
            if any(fault.first <= line <= fault.last for line in in_graph) and not in_graph & fault.constant:
                self._left.remove(fault)
                if fault.kind == INVERTED:
                    self._facts.inverted_masks.append(fault.site)
                else:
                    self._facts.self_compared[fault.site] = fault.kind == CONSTANT


def _faults_in(file: str) -> tuple[_Fault, ...]:
    return (*_self_comparisons(file), *_constant_entropies(file), *_inverted_masks(file))


# Values that are compared with themselves


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def _self_comparisons(file: str) -> tuple[_Fault, ...]:
    """Return the calls of losses whose input and target are computed from the same values in the same way."""
    if not any(says(file, word) for word in (*COMPARISONS, *COMPARING_MODULES)):
        return ()
    modules = _names_made_by(COMPARING_MODULES, file)
    found = []
    for function in functions_of(file):
        asserted = {id(each) for node in ast.walk(function) if isinstance(node, ast.Assert) for each in ast.walk(node)}
        calls = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and len(node.args) == 2 and id(node) not in asserted
            if call_name(node) in COMPARISONS or call_name(node) in modules
        ]
        body = _body_of(function) if calls else _Body({}, frozenset())
        for call in calls:
            one, other = (_canonical(each, body) for each in call.args)
            if one is not None and one == other:
                found.append(_fault(COMPARED, file, call, function))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def _constant_entropies(file: str) -> tuple[_Fault, ...]:
    """Return the cross entropies by hand, as terms of a sum, of values with the same values, used for nothing else.

    Only a fault if these have no graph: an entropy of the model's own output regularises it. Where the values are also
    compared with others, as in the parts of a divergence, a constant part is no fault.
    """
    if not says(file, "softmax", "log"):
        return ()
    found = []
    for function in functions_of(file):
        products = [
            node for node in ast.walk(function) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        ]
        body = _body_of(function) if products else _Body({}, frozenset())
        for product in products:
            sides = [_made_by(each, body) for each in (product.left, product.right)]
            logs = [each for each in sides if call_name(each) in ("log_softmax", "log")]
            if len(logs) != 1 or not all(isinstance(each, ast.Call) for each in sides):
                continue
            (log,), (soft,) = logs, [each for each in sides if each is not logs[0]]
            values = _canonical(log, body)
            if call_name(soft) != "softmax" or values is None or values != _canonical(soft, body):
                continue
            reads = [
                node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            ]
            names = {each.id for each in (product.left, product.right) if isinstance(each, ast.Name)}
            used_else = reads.count(_name_given_to(log)) > 2 or any(reads.count(name) > 1 for name in names)
            site = CallSite(file=file, line=log.lineno, function=function.name)
            lines = frozenset((log.lineno, soft.lineno, product.lineno))
            sums = () if used_else else _sums_with(product, function)
            found += [_Fault(CONSTANT, site, each.lineno, each.end_lineno or each.lineno, lines) for each in sums]
    return tuple(found)


def _made_by(node: ast.expr, body: _Body) -> ast.expr:
    return body.values.get(node.id, node) if isinstance(node, ast.Name) else node


def _name_given_to(call: ast.expr) -> str:
    """Return the name of the values in ``F.softmax(values / 2, -1)`` or ``values.softmax(-1)``."""
    given: ast.expr | None = call
    while given is not None and not isinstance(given, ast.Name):
        if isinstance(given, ast.Call):
            is_method = isinstance(given.func, ast.Attribute) and root_name(given.func) not in TORCH
            given = given.func.value if is_method else next(iter(given.args), None)  # type: ignore[attr-defined]
        else:
            given = given.left if isinstance(given, ast.BinOp) else getattr(given, "value", None)
    return "" if given is None else given.id


def _sums_with(product: ast.expr, function: ast.AST) -> Iterator[ast.BinOp]:
    """Yield the sums of something and a name that is assigned what a product makes, perhaps multiplied."""
    names = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(each is product for each in ast.walk(node.value)):
            names |= bound_names(node)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            factors = [
                each
                for side in (node.left, node.right)
                for each in ((side.left, side.right) if isinstance(side, ast.BinOp) else (side,))
            ]
            if any(isinstance(each, ast.Name) and each.id in names for each in factors):
                yield node


def _fault(kind: str, file: str, at: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef) -> _Fault:
    site = CallSite(file=file, line=at.lineno, function=function.name)
    # Outside of functions, other lines run as well when this one does not: it is in a loop, or behind a condition.
    near = [each for each in function.body if each.lineno <= at.lineno <= (each.end_lineno or 0)]
    ran = near[0] if function.name == "<module>" else function
    return _Fault(kind, site, ran.lineno, ran.end_lineno or ran.lineno)


def _names_made_by(classes: tuple[str, ...], file: str) -> set[str]:
    """Return the variables and attributes that are assigned objects of these classes."""
    return {
        call_name(target)
        for node in nodes_of(file)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and call_name(node.value) in classes
        for target in node.targets
    }


def _body_of(function: ast.AST) -> _Body:
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    values: dict[str, ast.expr] = {}
    times: Counter[str] = Counter()
    changed: set[str] = set()
    for each in statements:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            values[each.targets[0].id] = each.value
            times[each.targets[0].id] += 1
        elif not isinstance(each, (*FUNCTIONS, ast.ClassDef)):
            heads = [part for part in ast.iter_child_nodes(each) if not isinstance(part, ast.stmt)]
            bound = set().union(*map(bound_names, heads))
            changed |= bound & {name for name in bound if times[name] or isinstance(each, ast.For | ast.AugAssign)}
            times.update(bound)
        for node in ast.walk(each):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                changed.add(root_name(node) or "")
            elif isinstance(node, ast.Call) and call_name(node).endswith("_") and isinstance(node.func, ast.Attribute):
                changed.add(root_name(node.func) or "")
    unclear = changed | {name for name, count in times.items() if count > 1}
    return _Body({name: value for name, value in values.items() if name not in unclear}, frozenset(unclear))


def _canonical(node: ast.expr, body: _Body, depth: int = 0) -> str | None:
    """Return the text of what an expression is computed from, without a softmax of it; None if it may change."""
    if depth > MOST_DEPTH:
        return None
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.UnaryOp):
        inner = _canonical(node.operand, body, depth)
        return None if inner is None else f"{type(node.op).__name__}({inner})"
    if isinstance(node, ast.Name):
        if node.id in body.unclear:
            return None
        value = body.values.get(node.id)
        inner = None if value is None else _canonical(value, body, depth + 1)
        return node.id if inner is None else inner
    if isinstance(node, ast.Attribute):
        inner = _canonical(node.value, body, depth)
        return None if inner is None else f"{inner}.{node.attr}"
    if isinstance(node, ast.BinOp):
        sides = [_canonical(each, body, depth) for each in (node.left, node.right)]
        return None if None in sides else f"({sides[0]} {type(node.op).__name__} {sides[1]})"
    if isinstance(node, ast.Call) and call_name(node) in PURE:
        is_method = isinstance(node.func, ast.Attribute) and root_name(node.func) not in TORCH
        given: list[ast.expr] = [node.func.value] if is_method else []  # type: ignore[attr-defined]
        parts = [_canonical(each, body, depth) for each in (*given, *node.args)]
        if None in parts or not parts:
            return None
        if call_name(node) in TRANSPARENT:
            return parts[0]
        return f"{call_name(node)}({', '.join(map(str, parts))})"
    return None


# Padding masks


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def _inverted_masks(file: str) -> tuple[_Fault, ...]:
    """Return the calls of torch's attention whose padding mask is true for the other tokens: those are left out."""
    if not says(file, "key_padding_mask"):
        return ()
    found = []
    modules = _names_made_by(ATTENTIONS, file)
    for function in functions_of(file):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and call_name(node) in modules]
        body = _body_of(function) if calls else _Body({}, frozenset())
        for value in (word.value for call in calls for word in call.keywords if word.arg in PADDING_MASKS):
            mask = body.values.get(value.id, value) if isinstance(value, ast.Name) else value
            if _is_true_for_tokens(mask):
                found.append(_fault(INVERTED, file, mask, function))
    return tuple(dict.fromkeys(found))


def _is_true_for_tokens(mask: ast.expr) -> bool:
    """Whether a mask is ``tokens != pad``: true where something is to be attended to."""
    if isinstance(mask, ast.Call) and call_name(mask) in ("bool", "to"):
        return isinstance(mask.func, ast.Attribute) and _is_true_for_tokens(mask.func.value)
    if isinstance(mask, ast.Compare) and len(mask.ops) == 1 and isinstance(mask.ops[0], ast.NotEq):
        return _is_padding(mask.comparators[0]) or _is_padding(mask.left)
    is_method = isinstance(mask, ast.Call) and call_name(mask) in ("ne", "not_equal") and len(mask.args) == 1
    return is_method and _is_padding(mask.args[0])  # type: ignore[attr-defined]


def _is_padding(value: ast.expr) -> bool:
    """Whether an expression is the number of the padding token."""
    if isinstance(value, ast.Constant):
        return type(value.value) is int and value.value == 0
    return isinstance(value, ast.Name | ast.Attribute) and "pad" in call_name(value).lower()
