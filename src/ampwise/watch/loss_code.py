"""The script's own statements that compute a loss, to run them again.

When ``loss.backward()`` is called, the function that calls it is still running. The statements that its loss depends
on are read from the source, and the values that they begin with from the function's variables; nothing is copied but
references. Where the loss was given to a helper as an argument, the code of its caller comes first. Statements before
the first call of the model are left out: what they computed is at hand.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ampwise.trace.call_site import code_owner
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, changed_names, free_names
from ampwise.watch.inspection import copied_by_reference, version_of

__all__ = ["LossCode", "Running", "loss_code", "running_code"]

RESULT = "__ampwise_loss__"
MOST_FRAMES = 4  # a loss that is handed through more functions than this is not followed
LOOPS = (ast.For, ast.AsyncFor, ast.While)
RECEIVES_LOSS = ("backward", "item", "isnan", "isinf", "isfinite", "tolist", "numpy")
NEEDS_ITS_FUNCTION = (ast.Await, ast.Yield, ast.YieldFrom, ast.Return)  # cannot run elsewhere

Running = tuple[Any, ...]  # a function, its instruction, and the same of the function that it called


@dataclass(frozen=True, slots=True)
class Slice:
    """Statements of one function that compute one expression, and the names whose values they begin with."""

    code: CodeType
    names: tuple[str, ...]
    parameters: frozenset[str]  # of the function
    own: str | None  # the name of ``self``
    attributes: tuple[str, ...]  # of ``self``, whose values they begin with


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a function that the script has called."""

    name: str
    place: int | None  # its position; None: by keyword only
    is_method: bool

    @classmethod
    def of(cls, code: CodeType, name: str) -> _Parameter:
        by_position = code.co_varnames[: code.co_argcount]
        place = by_position.index(name) if name in by_position else None
        return cls(name, place, is_method=by_position[:1] in (("self",), ("cls",)))

    def in_caller(self, call: ast.Call, own: str | None) -> ast.expr | None:
        """Return what a call passes for it; None if that is unclear."""
        for word in call.keywords:
            if word.arg == self.name:
                return word.value
        if self.place is None or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        place = self.place - (self.is_method and not _is_called_on_class(call))
        return call.args[place] if 0 <= place < len(call.args) else None


@dataclass(frozen=True, slots=True)
class _Attribute:
    """An attribute of ``self`` that another method of the same object has set."""

    name: str

    def in_caller(self, call: ast.Call, own: str | None) -> ast.expr | None:
        if own is None:
            return None
        return ast.copy_location(ast.Attribute(ast.Name(own, ast.Load()), self.name, ast.Load()), call)


def _is_called_on_class(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id[:1].isupper()


@dataclass(slots=True)
class _Stage:
    slice: Slice
    names: dict[str, Any]
    variables: dict[str, Any]
    result_is: str | None = None  # the name under which the next stage gets the result


@dataclass(slots=True)
class LossCode:
    """The code of one loss, outermost function first, with the values it began with."""

    stages: list[_Stage] = field(default_factory=list)
    tensors: list[tuple[Tensor, int]] = field(default_factory=list)  # with their versions

    def run(self) -> Any:
        """Run the statements again and return the loss."""
        given: dict[str, Any] = {}
        result = None
        for stage in self.stages:
            names = {**stage.names, **stage.variables, **given}
            exec(stage.slice.code, names)
            result = names[RESULT]
            given = {} if stage.result_is is None else {stage.result_is: result}
        return result

    def batch(self) -> dict[str, Tensor]:
        """Return the tensors that it begins with, by name."""
        pairs = [pair for stage in self.stages for pair in stage.variables.items()]
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def objects(self) -> list[Any]:
        """Return what its statements may change."""
        values = [value for stage in self.stages for value in stage.variables.values()]
        return [value for value in values if not isinstance(value, Tensor)]

    def computed(self) -> list[Tensor]:
        """Return the tensors that it begins with and that were computed before, by code that is not known."""
        return [tensor for tensor, _ in self.tensors if tensor.requires_grad and not isinstance(tensor, Parameter)]

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor that it begins with was written to since."""
        return all(version_of(tensor) == version for tensor, version in self.tensors)


def running_code() -> Running:
    """Return the functions on the stack, each with the instruction that it is running. This runs at each step."""
    found: Running = ()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = (frame.f_code, frame.f_lasti, found)
        frame = frame.f_back
    return found


def loss_code(frame: FrameType | None, model_calls: Sequence[Running]) -> LossCode | None:
    """Return the code of the loss that the innermost own function on the stack is using now; None if it is unknown.

    model_calls: what was running when models were called, the first call first.
    """
    if frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame = _caller(frame)
    model_lines: dict[CodeType, int] = {}
    for running in reversed(model_calls):
        while running:  # the outermost function is at the front
            code, instruction, running = running
            if code_owner(code.co_filename) == "own":
                model_lines[code] = _line_of(code, instruction)
    made = LossCode()
    wanted: _Parameter | _Attribute | None = None  # of the inner function, whose value this one computes
    this: Any = None  # the object whose attribute it is
    for _ in range(MOST_FRAMES):
        found = None if frame is None else _slice(frame.f_code, frame.f_lasti, model_lines.get(frame.f_code, 0), wanted)
        if frame is None or found is None:
            return None
        here = frame.f_locals
        if isinstance(wanted, _Attribute) and here.get(found.own or "") is not this:
            return None
        # A tensor with a graph that the function was given was computed by its caller.
        names = {name: here[name] for name in found.names if name in here}
        this = here.get(found.own) if found.own is not None else None
        given = [name for name in names if name in found.parameters and _has_graph(names[name])]
        attributes = [name for name in found.attributes if _has_graph(getattr(this, name, None))]
        kept = {
            name: copied_by_reference(value, made.tensors) if isinstance(value, Tensor | list | tuple | dict) else value
            for name, value in names.items()
            if name not in given
        }
        result_is = wanted.name if isinstance(wanted, _Parameter) else None
        made.stages.insert(0, _Stage(found, frame.f_globals, kept, result_is))
        if not given and not attributes:
            return made
        if len(given) + len(attributes) > 1:
            return None
        wanted = _Parameter.of(frame.f_code, given[0]) if given else _Attribute(attributes[0])
        frame = _caller(frame)
    return None


@lru_cache(maxsize=1024)
def _line_of(code: CodeType, instruction: int) -> int:
    return next(islice(code.co_positions(), instruction // 2, None), (0,))[0] or 0


def _caller(frame: FrameType) -> FrameType | None:
    outer = frame.f_back
    while outer is not None and code_owner(outer.f_code.co_filename) != "own":
        outer = outer.f_back
    return outer


def _has_graph(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_graph, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.grad_fn is not None


# The source


@lru_cache(maxsize=256)
def _slice(code: CodeType, instruction: int, model_line: int, wanted: _Parameter | _Attribute | None) -> Slice | None:
    """Return the statements of a function that compute the loss, or an argument, of the call that it is running.

    They begin at the line that calls the model, or else at the innermost loop around the call.
    """
    tree = _tree(code.co_filename)
    position = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    way = None if tree is None or None in position else _way_to(tree, position)
    if way is None:
        return None
    call = way[-1]
    assert isinstance(call, ast.Call)
    function = next((node for node in reversed(way) if isinstance(node, FUNCTIONS)), None)
    if any(isinstance(node, ast.Lambda) for node in way[way.index(function) if function else 0 :]):
        return None
    own = None
    parameters: frozenset[str] = frozenset()
    if function is not None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters = frozenset(each.arg for each in arguments)
        own = arguments[0].arg if arguments and arguments[0].arg == "self" else None
    expression = _loss_of(call) if wanted is None else wanted.in_caller(call, own)
    if expression is None or isinstance(expression, ast.Constant):  # exec("..."): it has no file
        return None
    inside = way[way.index(function) + 1 if function is not None else 1 :]
    last_loop = max([number for number, node in enumerate(inside) if isinstance(node, LOOPS)], default=-1)
    root: ast.AST = inside[last_loop] if last_loop >= 0 else (function or way[0])
    chain = [node for node in inside[last_loop + 1 :] if isinstance(node, ast.stmt)]
    needed = free_names(expression, own)
    result = ast.Assign(targets=[ast.Name(RESULT, ast.Store())], value=expression)
    ast.copy_location(result, expression)
    cls = next((node for node in reversed(way) if isinstance(node, ast.ClassDef)), None)
    reader = _Reader(own, model_line, {} if own is None or cls is None else _attributes_set(cls))
    body = reader.statements_before(root, chain, needed, result)
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    if any(isinstance(node, NEEDS_ITS_FUNCTION) or _needs_its_class(node) for node in ast.walk(module)):
        return None
    names = {name.partition(".")[0] if name.startswith("self.") else name for name in needed}
    if own is not None and "self" in names:
        names.add(own)
    try:
        compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # such as `break` outside of its loop
        return None
    attributes = sorted(name.removeprefix("self.") for name in needed if name.startswith("self."))
    return Slice(compiled, tuple(sorted(names)), parameters, own, tuple(attributes))


def _needs_its_class(node: ast.AST) -> bool:
    """Return whether a node works only inside of its class: ``super()``, or a name that Python mangles."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.startswith("__") and not name.endswith("__")


@lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _way_to(tree: ast.Module, position: tuple[int | None, ...]) -> list[ast.AST] | None:
    """Return the nodes from the whole file to the call at a position; None if there is none."""
    way: list[ast.AST] = [tree]
    found = None
    while True:
        inner = next((child for child in ast.iter_child_nodes(way[-1]) if _contains(child, position)), None)
        if inner is None:
            return found
        way.append(inner)
        if isinstance(inner, ast.Call) and position == (
            *(inner.lineno, inner.end_lineno),
            *(inner.col_offset, inner.end_col_offset),
        ):
            found = list(way)


def _contains(node: Any, position: tuple[Any, ...]) -> bool:
    if not hasattr(node, "lineno"):  # an item of a `with`, arguments, a `case`: as large as its parts
        return any(_contains(part, position) for part in ast.iter_child_nodes(node))
    line, end_line, column, end_column = position
    start = (node.lineno, node.col_offset)
    for decorator in getattr(node, "decorator_list", ()):
        start = min(start, (decorator.lineno, 0))
    return start <= (line, column) and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def _loss_of(call: ast.Call) -> ast.expr | None:
    """Return the loss in ``loss.backward()``, ``scaler.scale(loss).backward()`` or ``accelerator.backward(loss)``."""
    func = call.func
    loss: ast.expr | None = None
    if isinstance(func, ast.Attribute) and func.attr in RECEIVES_LOSS and not call.args:
        loss = func.value
    elif call.args:
        loss = call.args[0]
    else:
        loss = next((word.value for word in call.keywords if word.arg in ("loss", "tensors", "input")), None)
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale" and loss.args:
        loss = loss.args[0]
    if isinstance(loss, ast.List | ast.Tuple) and len(loss.elts) == 1:
        loss = loss.elts[0]
    return None if isinstance(loss, ast.Starred) else loss


@lru_cache(maxsize=32)
def _attributes_set(cls: ast.ClassDef) -> dict[str, set[str]]:
    """Return the attributes of ``self`` that each method sets, itself or by calling others."""
    methods = {node.name: node for node in cls.body if isinstance(node, FUNCTIONS) and node.args.args}
    found = {
        name: set().union(*(bound_names(each, node.args.args[0].arg) for each in node.body))
        for name, node in methods.items()
    }
    for _ in range(3):
        for name, node in methods.items():
            own = node.args.args[0].arg
            for each in node.body:
                for called in _own_methods_called(each, own):
                    found[name] |= found.get(called, set())
    return {name: {each for each in those if each.startswith("self.")} for name, those in found.items()}


def _own_methods_called(node: ast.AST, own: str | None) -> list[str]:
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [
        func.attr
        for func in calls
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == own
    ]


@dataclass(slots=True)
class _Reader:
    """Reads the statements that define needed names, going backwards."""

    own: str | None
    first_line: int  # earlier statements are not needed: what they computed is at hand
    attributes_set: dict[str, set[str]]  # by each method of the class

    def statements_before(
        self, root: ast.AST, chain: Sequence[ast.stmt], needed: set[str], result: ast.stmt
    ) -> list[ast.stmt]:
        """Return the statements on the way to the call that define needed names, in order; ``needed`` grows.

        chain: the statements around the call, outermost first. A ``with`` around the call is entered again; of an
        ``if`` or a ``try`` only the block that runs is left.
        """
        body: list[ast.stmt] = [result]
        around = [root, *chain[:-1]]
        for outer, inner in zip(reversed(around), reversed(chain), strict=True):
            blocks = [block for block in _blocks(outer) if inner in block]
            before = blocks[0][: blocks[0].index(inner)] if blocks else []
            body = [*self.needed_of(before, needed), *body]
            if isinstance(outer, ast.With | ast.AsyncWith) and outer is not root:
                body = self.entered(outer, body, needed)
        return body

    def entered(self, block: ast.With | ast.AsyncWith, body: list[ast.stmt], needed: set[str]) -> list[ast.stmt]:
        for item in block.items:
            needed |= free_names(item.context_expr, self.own)
        return [ast.copy_location(ast.With(items=block.items, body=body), block)]

    def needed_of(self, statements: Sequence[ast.stmt], needed: set[str]) -> list[ast.stmt]:
        kept: list[ast.stmt] = []
        for statement in reversed(statements):
            if (statement.end_lineno or 0) < self.first_line or isinstance(statement, ast.Global | ast.Nonlocal):
                continue
            if isinstance(statement, ast.With | ast.AsyncWith):
                inner = self.needed_of(statement.body, needed)
                names = set().union(*(bound_names(item, self.own) for item in statement.items))
                if inner or names & needed:
                    kept = [*self.entered(statement, inner or [ast.Pass()], needed), *kept]
                continue
            called = _own_methods_called(statement, self.own) if self.own is not None else []
            changes = changed_names(statement, self.own).union(
                *(self.attributes_set.get(each, set()) for each in called)
            )
            bound = bound_names(statement, self.own)
            if needed.isdisjoint(bound | changes):
                continue
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                needed -= bound
            needed |= free_names(statement, self.own)
            needed -= {name for name in changes if name.startswith("self.")} - free_names(statement, self.own)
            kept.insert(0, statement)
        return kept


def _blocks(node: ast.AST) -> Iterable[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        yield part.body
