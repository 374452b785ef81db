"""Terms of a loss without a graph: ``torch.tensor`` has copied values, or ``autograd.grad`` computed them, without one.

The function that calls ``backward`` is still running: which terms its loss has is read from the source, and their
values from the function's variables.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner
from ampwise.trace.names_in_code import (
    DEFINITIONS,
    FUNCTIONS,
    bound_names,
    call_name,
    changed_names,
    free_names,
    root_name,
    tree_of,
)
from ampwise.watch.code_slice import loss_of, way_to
from ampwise.watch.learning import CountedCalls, Learning

__all__ = ["MOST_NAMES", "Callers", "Scope", "callers_of", "note_cut_term", "scope_of", "value_of"]

MAKERS = ("tensor", "Tensor", "FloatTensor", "as_tensor")
SUMS = ("sum", "mean")
ON_PURPOSE = ("detach", "item", "no_grad", "inference_mode")
MOST_NAMES = 8  # followed from the loss to the values
MOST_CALLERS = 8  # functions from a call outwards
MOST_ITEMS = 8  # of a list that are looked at
UNKNOWN = object()


class _Assignment(NamedTuple):
    value: ast.expr
    quiet: bool  # under ``torch.no_grad()``
    adds: bool  # ``+=``


@dataclass(slots=True)
class Scope:
    """The loss that a call gets, and what its function assigns."""

    loss: ast.expr
    assigned: dict[str, list[_Assignment]] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)  # names that are also bound otherwise, such as by a loop
    copies: bool = False  # the function copies values into new tensors
    binding: dict[str, list[ast.AST]] = field(default_factory=dict)  # statements that set or extend a name

    def of(self, name: str) -> list[_Assignment]:
        """Return the assignments that make a name: one, and additions to it."""
        every = [] if name in self.unclear else self.assigned.get(name, [])
        return every if sum(not each.adds for each in every) == 1 else []


Callers = dict[tuple[str, str], str]  # by file and name of a function: the one that it calls


def callers_of(frame: FrameType | None) -> Callers:
    """Return the functions that have led to the call that runs now, beginning with the one that contains it.

    It ends where one of them may take what it is returned out of the graph on purpose.
    """
    found: Callers = {}
    callee = ""
    while frame is not None and len(found) < MOST_CALLERS:
        code = frame.f_code
        if code_owner(code.co_filename) == "own":
            found.setdefault((code.co_filename, code.co_name), callee)
            if callee and not {*ON_PURPOSE}.isdisjoint(code.co_names):
                break
            callee = code.co_name
        frame = frame.f_back
    return found


def note_cut_term(
    frame: FrameType | None,
    facts: Learning,
    step: int,
    flat_sites: Mapping[CallSite, Callers],
    trains: Callable[[Tensor], bool],
) -> None:
    """Note the line where a term of the loss that is differentiated now has lost its graph.

    flat_sites: calls of ``autograd.grad`` whose gradients have no graph, and what led to them. trains: whether the
    graph of a term leads to more than what they are the gradients of.
    """
    while frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame = frame.f_back
    scope = None if frame is None else scope_of(frame.f_code, frame.f_lasti)
    if frame is None or scope is None or not (scope.copies or flat_sites):
        return
    values = frame.f_locals if frame.f_locals is frame.f_globals else {**frame.f_globals, **frame.f_locals}
    for term in _added(scope.loss, scope, values, trains) if flat_sites else ():
        for site, callers in flat_sites.items():
            if _comes_from(term, site, callers.get((frame.f_code.co_filename, frame.f_code.co_name)), scope):
                facts.flat_penalties.setdefault(site, CountedCalls(step=step)).times += 1
    maker = _Terms(scope, values).cut(scope.loss) if scope.copies else None
    if maker is not None:
        code = frame.f_code
        site = CallSite(file=code.co_filename, line=maker.lineno, function=code.co_name)
        facts.cut_terms.setdefault(site, CountedCalls(step=step, what=call_name(maker))).times += 1


@lru_cache(maxsize=256)
def scope_of(code: CodeType, instruction: int) -> Scope | None:
    """Return the loss that a call differentiates, and what its function assigns."""
    tree = tree_of(code.co_filename)
    position = next(islice(code.co_positions(), instruction // 2, None), (None,))
    way = None if tree is None or None in position else way_to(tree, position)
    loss = loss_of(way[-1]) if way and isinstance(way[-1], ast.expr) else None
    if not way or loss is None:
        return None
    root = next(each for each in reversed(way) if isinstance(each, (*FUNCTIONS, ast.Module)))
    found = Scope(loss)
    found.copies = any(isinstance(each, ast.Call) and call_name(each) in MAKERS for each in ast.walk(root))
    for statement, quiet in chain.from_iterable(_statements(each, quiet=False) for each in root.body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        adds = isinstance(statement, ast.AugAssign) or _adds_to_itself(statement)
        is_clear = not isinstance(statement, ast.AugAssign) or isinstance(statement.op, ast.Add | ast.Sub)
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and isinstance(target, ast.Name):
            value = statement.value if isinstance(statement, ast.AugAssign) or not adds else statement.value.right  # type: ignore[union-attr]
            if is_clear and value is not None and len(getattr(statement, "targets", "1")) == 1:
                found.assigned.setdefault(target.id, []).append(_Assignment(value, quiet, adds))
                continue
        found.unclear |= bound_names(statement)
    for each in ast.walk(root):
        is_loop = isinstance(each, ast.For)
        if is_loop or (isinstance(each, ast.stmt) and not isinstance(each, DEFINITIONS) and not hasattr(each, "body")):
            for name in bound_names(each.target) if is_loop else {*bound_names(each), *changed_names(each)}:  # type: ignore[attr-defined]
                found.binding.setdefault(name, []).append(each.iter if is_loop else each)  # type: ignore[attr-defined]
    return found


def _statements(statement: ast.stmt, *, quiet: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the statements in a statement that have no others in them, and the heads of the others."""
    if isinstance(statement, ast.With | ast.AsyncWith):
        quiet |= any(word in ast.unparse(item.context_expr) for item in statement.items for word in ON_PURPOSE)
    inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt | ast.ExceptHandler)]
    if isinstance(statement, DEFINITIONS) or not inner:
        yield statement, quiet
        return
    for each in ast.iter_child_nodes(statement):
        if isinstance(each, ast.ExceptHandler):
            for part in each.body:
                yield from _statements(part, quiet=quiet)
        elif isinstance(each, ast.stmt):
            yield from _statements(each, quiet=quiet)
        else:
            yield each, quiet


def _added(
    term: ast.expr, scope: Scope, values: Mapping[str, Any], trains: Callable[[Tensor], bool], depth: int = 0
) -> Iterator[ast.Name]:
    """Yield the names that are added in a loss, perhaps multiplied by numbers, whose values train nothing."""
    if isinstance(term, ast.UnaryOp):
        yield from _added(term.operand, scope, values, trains, depth)
    elif isinstance(term, ast.BinOp) and isinstance(term.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        sides = [term.left] if isinstance(term.op, ast.Div) else [term.left, term.right]
        if isinstance(term.op, ast.Mult):
            sides = [each for each in sides if not isinstance(value_of(each, values), int | float)]
        if not isinstance(term.op, ast.Mult) or len(sides) == 1:  # else it may be the weight of another term
            for each in sides:
                yield from _added(each, scope, values, trains, depth)
    elif isinstance(term, ast.Name):
        value = values.get(term.id)
        if isinstance(value, Tensor) and value.numel() == 1 and not trains(value):
            yield term
        elif isinstance(value, Tensor) and depth < MOST_NAMES:
            for made in scope.of(term.id):
                yield from _added(made.value, scope, values, trains, depth + 1)


def _comes_from(term: ast.Name, site: CallSite, callee: str | None, scope: Scope) -> bool:
    """Whether a name is computed from what a call has returned.

    callee: the function that the term's function has called for it; empty: the call is in the same function.
    """
    names, pending = set[str](), [] if callee is None else [term.id]
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        for statement in scope.binding.get(name, ()):
            for call in (each for each in ast.walk(statement) if isinstance(each, ast.Call)):
                is_at = _is_grad(call) and call.lineno <= (site.line or 0) <= (call.end_lineno or 0)
                if call_name(call) == callee if callee else is_at:
                    return True
            if not any(call_name(each) in ON_PURPOSE for each in ast.walk(statement) if isinstance(each, ast.Call)):
                pending += free_names(statement)
    return False


def _is_grad(call: ast.Call) -> bool:
    return call_name(call) == "grad" and not any(word.arg == "create_graph" for word in call.keywords)


def _adds_to_itself(statement: ast.AST) -> bool:
    """Whether it is ``x = x + y``."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.BinOp):
        return False
    targets = [getattr(each, "id", "") for each in statement.targets]
    left, op = statement.value.left, statement.value.op
    return isinstance(op, ast.Add | ast.Sub) and isinstance(left, ast.Name) and [left.id] == targets


class _Terms:
    """The terms of a loss, with the values of the variables in them."""

    def __init__(self, scope: Scope, values: Mapping[str, Any]) -> None:
        self._scope, self._values = scope, values
        self._left = MOST_NAMES

    def cut(self, term: ast.expr) -> ast.Call | None:
        """Return the call that has copied values with a graph, if a term of the loss has none because of it."""
        if isinstance(term, ast.UnaryOp):
            return self.cut(term.operand)
        if isinstance(term, ast.BinOp):
            if isinstance(term.op, ast.Add | ast.Sub):
                return self.cut(term.left) or self.cut(term.right)
            if isinstance(term.op, ast.Mult | ast.Div) and self._is_number(term.right):
                return self.cut(term.left)
            return self.cut(term.right) if isinstance(term.op, ast.Mult) and self._is_number(term.left) else None
        if isinstance(term, ast.Name):
            return self._cut_name(term.id)
        is_sum = isinstance(term, ast.Call) and call_name(term) in SUMS
        return self._source(term) if is_sum and self._is_free(term) else None

    def _cut_name(self, name: str) -> ast.Call | None:
        value, self._left = self._values.get(name), self._left - 1
        if self._left < 0 or not isinstance(value, Tensor) or value.numel() != 1:
            return None
        for each in self._scope.of(name):
            if not each.quiet and (found := self.cut(each.value)) is not None:
                return found
        return None

    def _is_number(self, term: ast.expr) -> bool:
        return isinstance(value_of(term, self._values), int | float)

    def _is_free(self, term: ast.expr) -> bool:
        """Whether a term has no graph: none of what it is computed from has one."""
        if isinstance(term, ast.Name | ast.Attribute | ast.Subscript | ast.Constant):
            value = value_of(term, self._values)
            return not value.requires_grad if isinstance(value, Tensor) else isinstance(value, int | float)
        if isinstance(term, ast.UnaryOp):
            return self._is_free(term.operand)
        if isinstance(term, ast.BinOp):
            return self._is_free(term.left) and self._is_free(term.right)
        if not isinstance(term, ast.Call):
            return False
        if _is_maker(term):
            return not any(word.arg == "requires_grad" for word in term.keywords)
        if isinstance(term.func, ast.Attribute) and term.func.attr in ON_PURPOSE:
            return True
        given = [*term.args, *(word.value for word in term.keywords)]
        if isinstance(term.func, ast.Attribute) and not self._is_module(term.func.value):
            given.append(term.func.value)
        return isinstance(term.func, ast.Attribute) and all(map(self._is_free, given))

    def _is_module(self, node: ast.expr) -> bool:
        """Whether it is a module of torch, such as ``torch`` or ``F``."""
        name = root_name(node)
        return name is not None and isinstance(self._values.get(name), ModuleType)

    def _source(self, term: ast.expr) -> ast.Call | None:
        """Return the call in a term, or in what its names were made by, that has copied values with a graph."""
        if isinstance(term, ast.Call) and _is_maker(term):
            return term if term.args and _carries_graph(term.args[0], self._values) else None
        if isinstance(term, ast.Call) and call_name(term) in ON_PURPOSE:
            return None
        if isinstance(term, ast.Name):
            self._left -= 1
            made = [] if self._left < 0 else self._scope.of(term.id)
            parts: Sequence[Any] = [each.value for each in made if not each.quiet]
        else:
            parts = [each for each in ast.iter_child_nodes(term) if isinstance(each, ast.expr)]
        return next((found for each in parts if (found := self._source(each)) is not None), None)


def _is_maker(call: ast.Call) -> bool:
    return call_name(call) in MAKERS and root_name(call.func) == "torch"


def _carries_graph(given: ast.expr, values: Mapping[str, Any]) -> bool:
    """Whether values that ``torch.tensor`` is given, or that were read for it, are those of tensors with a graph."""
    if isinstance(given, ast.List | ast.Tuple):
        return any(_carries_graph(each, values) for each in given.elts)
    if isinstance(given, ast.ListComp) and len(given.generators) == 1:
        part = given.generators[0]
        items = value_of(part.iter, values)
        if not isinstance(items, list | tuple | deque):
            return False
        return any(
            _carries_graph(given.elt, {**values, **_bound(part.target, each)}) for each in islice(items, MOST_ITEMS)
        )
    if isinstance(given, ast.Call) and call_name(given) in ("item", "float"):
        read = given.func.value if isinstance(given.func, ast.Attribute) else next(iter(given.args), None)
        return read is not None and _carries_graph(read, values)
    value = value_of(given, values)
    every = islice(value, MOST_ITEMS) if isinstance(value, list | tuple | deque) else [value]
    return any(isinstance(each, Tensor) and each.grad_fn is not None for each in every)


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    """Return the names that a loop sets for an item."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    parts = target.elts if isinstance(target, ast.Tuple) else []
    names = [each.id if isinstance(each, ast.Name) else "" for each in parts]
    return dict(zip(names, item, strict=True)) if isinstance(item, tuple | list) and len(item) == len(names) else {}


def value_of(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of a name, an attribute or an item, without running code of the script; else UNKNOWN."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        holder = value_of(node.value, values)
        if isinstance(holder, tuple) and node.attr in getattr(holder, "_fields", ()):
            return getattr(holder, node.attr)
        return getattr(holder, "__dict__", {}).get(node.attr, UNKNOWN)
    if isinstance(node, ast.Subscript):
        holder, key = value_of(node.value, values), value_of(node.slice, values)
        if type(holder) in (list, tuple) and isinstance(key, int) and -len(holder) <= key < len(holder):
            return holder[key]
        return holder.get(key, UNKNOWN) if type(holder) is dict and isinstance(key, str | int) else UNKNOWN
    return UNKNOWN
