"""The script's own statements that compute a loss, to run them again.

When ``loss.backward()`` is called, the function that calls it is still running. The statements that its loss depends
on are read from the source, and the values that they begin with from the function's variables; nothing is copied but
references. Where the loss was given to a helper as an argument, the code of its caller comes first. Statements before
the first call of the model are left out: what they computed is at hand.
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, GeneratorType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner
from ampwise.trace.names_in_code import FUNCTIONS, bound_names, changed_names, free_names
from ampwise.trace.replay import is_finite
from ampwise.watch.inspection import copied_by_reference, tensors_in, version_of

__all__ = [
    "LossCode",
    "Running",
    "code_between",
    "data_code",
    "loss_code",
    "only_assignment_of",
    "own_caller",
    "running_code",
]

RESULT = "__ampwise_loss__"
ITEM = "__ampwise_item__"  # what a loop iterates over has given last
MOST_FRAMES = 4  # a loss that is handed through more functions than this is not followed
LOOPS = (ast.For, ast.AsyncFor, ast.While)
USES = (ast.Call, ast.Yield, ast.Compare)  # of a value
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
PROGRESS = ("tqdm", "trange", "track", "iter", "list")  # what a script may wrap a loader in
REPORTING = ("print", "append", "write", "log", "info", "debug", "warning", "add_scalar", "set_postfix", "save")
RECEIVES_LOSS = ("backward", "item", "isnan", "isinf", "isfinite", "tolist", "numpy")
MOST_LIVE_OBJECTS = 5_000_000  # among which a generator is searched for
NEEDS_ITS_FUNCTION = (ast.Await, ast.Yield, ast.YieldFrom, ast.Return)  # cannot run elsewhere

Running = tuple[Any, ...]  # a function, its instruction, and the same of the function that it called


@dataclass(frozen=True, slots=True)
class Slice:
    """Statements of one function that compute one expression, and the names whose values they begin with."""

    code: CodeType
    names: tuple[str, ...]
    parameters: frozenset[str]  # of the function
    attributes: tuple[str, ...]  # of ``self``, whose values they begin with
    loop_target: frozenset[str] = frozenset()  # names that the loop around them sets
    take_item: CodeType | None = None  # sets them
    iterates: frozenset[str] = frozenset()  # names in what the loop iterates over
    rebound: frozenset[str] = frozenset()  # names that they begin with and set: the first values are gone


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a function that the script has called."""

    name: str
    place: int | None  # its position; None: by keyword only
    is_method: bool

    @classmethod
    def of(cls, code: CodeType, name: str, *, is_method: bool) -> _Parameter:
        by_position = code.co_varnames[: code.co_argcount]
        place = by_position.index(name) if name in by_position else None
        return cls(name, place, is_method=is_method or by_position[:1] == ("cls",))

    def in_caller(self, call: ast.expr, own: str | None) -> ast.expr | None:
        """Return what a call passes for it; None if that is unclear."""
        if not isinstance(call, ast.Call):
            return None
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

    def in_caller(self, call: ast.expr, own: str | None) -> ast.expr | None:
        if own is None:
            return None
        return ast.copy_location(ast.Attribute(ast.Name(own, ast.Load()), self.name, ast.Load()), call)


@dataclass(frozen=True, slots=True)
class _Yielded:
    """What a generator has yielded to a loop."""

    name: str = ITEM

    def in_caller(self, yielded: ast.expr, own: str | None) -> ast.expr | None:
        return yielded.value if isinstance(yielded, ast.Yield) else None


_Wanted = tuple[_Parameter | _Attribute | _Yielded, ...]


def _is_called_on_class(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id[:1].isupper()


@dataclass(slots=True)
class _Stage:
    slice: Slice
    names: dict[str, Any]
    variables: dict[str, Any]
    results_are: tuple[str, ...] = ()  # names under which the next stage gets the results
    takes_item: bool = False  # it begins with the last item of its loop


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
            if stage.takes_item and stage.slice.take_item is not None:
                exec(stage.slice.take_item, names)
            exec(stage.slice.code, names)
            result = names[RESULT]
            given = dict(zip(stage.results_are, result, strict=True)) if stage.results_are else {}
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


def loss_code(
    frame: FrameType | None, model_calls: Sequence[Running], instruction: int | None = None
) -> LossCode | None:
    """Return the code of the loss that the innermost own function on the stack is using now; None if it is unknown.

    model_calls: what was running when models were called, the first call first. instruction: the one that uses it, if
    the function has gone on since.
    """
    model_lines: dict[CodeType, int] = {}
    for running in reversed(model_calls):
        while running:  # the outermost function is at the front
            code, number, running = running
            if code_owner(code.co_filename) == "own":
                model_lines[code] = _line_of(code, number)
    return _code(frame, instruction, _has_graph, lambda frame: model_lines.get(frame.f_code, 0))


def data_code(frame: FrameType | None, instruction: int, *, loaded: bool) -> LossCode | None:
    """Return the code of a bad loss from where its data were finite; None if it is unknown.

    Only what is bad is computed again, as far out as the last batch of a generator. loaded: DataLoaders give batches.
    """
    return _code(frame, instruction, _is_bad, lambda frame: 0, at_hand=True, loaded=loaded)


def code_between(frame: FrameType, instruction: int) -> Callable[[], None] | None:
    """Return a function that runs the statements between one that a frame has run and its current one; None if none.

    Those that only report something are left out, and those that cannot run elsewhere.
    """
    tree, code = _tree(frame.f_code.co_filename), frame.f_code
    ways = [
        _way_to(tree, position)
        for each in (instruction, frame.f_lasti)
        if tree is not None and None not in (position := next(islice(code.co_positions(), each // 2, None), (None,)))
    ]
    if len(ways) < 2 or ways[0] is None or ways[1] is None:
        return None
    apart: list[tuple[Any, Any]] = [(a, b) for a, b in zip(*ways, strict=False) if a is not b]
    if not apart:
        return None
    first, last = apart[0]
    parent = ways[0][ways[0].index(first) - 1]
    block = next((block for block in _blocks(parent) if first in block and last in block), [])
    between = block[block.index(first) + 1 : block.index(last)] if block else []
    kept = [each for each in between if not (_only_reports(each) or _needs_its_place(each))]
    if not kept:
        return None
    between_them = compile(ast.Module(body=kept, type_ignores=[]), code.co_filename, "exec", dont_inherit=True)
    names = {**frame.f_globals, **frame.f_locals}
    return lambda: exec(between_them, dict(names))


def only_assignment_of(key: str, near: str | None) -> CallSite | None:
    """Return the only line that assigns to an item of this name, such as ``group["lr"]``.

    near: a file to look into; if none is there, in all of the script's own code.
    """
    found = _assignments(key, {near or ""})
    if not found:
        found = _assignments(key, {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())})
    return found[0] if len(found) == 1 else None


def _assignments(key: str, files: Set[str]) -> list[CallSite]:
    return [
        CallSite(file=file, line=node.lineno)
        for file in files
        if file.endswith(".py") and code_owner(file) == "own" and _has_item(key, file)
        for node in ast.walk(_tree(file) or ast.Module(body=[], type_ignores=[]))
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == key
    ]


def _has_item(key: str, file: str) -> bool:
    """Return whether a file names such an item at all: to parse each file of a large program takes seconds."""
    return any(f'["{key}"]' in line or f"['{key}']" in line for line in linecache.getlines(file))


def _only_reports(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _name_in(call.func) in REPORTING


def _needs_its_place(statement: ast.stmt) -> bool:
    unfit = (*NEEDS_ITS_FUNCTION, ast.Break, ast.Continue, ast.Global, ast.Nonlocal)
    return any(isinstance(node, unfit) or _needs_its_class(node) for node in ast.walk(statement))


def _code(
    frame: FrameType | None,
    instruction: int | None,
    is_computed: Callable[[Any], bool],
    first_line: Callable[[FrameType], int],
    *,
    at_hand: bool = False,
    loaded: bool = False,
) -> LossCode | None:
    """Return the statements that compute the loss in a function, in its callers, and in generators that it reads.

    is_computed: whether a value that a function was given must be computed again. at_hand: no other value is.
    """
    if frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame, instruction = own_caller(frame), None
    made = LossCode()
    wanted: _Wanted = ()  # of the inner function, whose values this one computes
    this: Any = None  # the object whose attribute it is
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        own, here = _own_name(frame), frame.f_locals
        line = first_line(frame)
        good = frozenset(name for name, value in here.items() if at_hand and not is_computed(value))
        instruction = frame.f_lasti if instruction is None else instruction
        found = _slice(frame.f_code, instruction, line, wanted, own, good)
        if found is None or (any(isinstance(each, _Attribute) for each in wanted) and here.get(own or "") is not this):
            return None
        names = {name: here[name] for name in found.names if name in here}
        if any(isinstance(value, Iterator) for value in names.values()):
            return None  # running the statements would advance it
        this = here.get(own) if own is not None else None
        given = [name for name in names if name in found.parameters and is_computed(names[name])]
        attributes = [name for name in found.attributes if is_computed(getattr(this, name, None))]
        yielded = [name for name in names if name in found.loop_target and is_computed(names[name])]
        if not line and not found.rebound.issubset({*given, *yielded}):
            return None
        kept = {
            name: copied_by_reference(value, made.tensors) if isinstance(value, Tensor | list | tuple | dict) else value
            for name, value in names.items()
            if name not in given and name not in yielded
        }
        results = tuple(each.name for each in wanted)
        made.stages.insert(0, _Stage(found, frame.f_globals, kept, results, takes_item=bool(yielded)))
        if not given and not attributes and not yielded:
            return made
        if bool(given) + bool(attributes) + bool(yielded) > 1 or len(attributes) > 1:
            return None
        instruction = None
        if yielded:
            wanted, frame = (_Yielded(),), _suspended(found.iterates, by_name=loaded)
        elif given:
            wanted = tuple(_Parameter.of(frame.f_code, name, is_method=own is not None) for name in given)
            frame = own_caller(frame)
        else:
            wanted, frame = (_Attribute(attributes[0]),), own_caller(frame)
    return None


def _own_name(frame: FrameType) -> str | None:
    """Return the name of ``self`` in a method; None in other functions."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else None
    if first is None or first == "self":
        return first
    method = getattr(type(frame.f_locals.get(first)), code.co_name, None)
    return first if getattr(method, "__code__", None) is code else None


def _suspended(names: Set[str], *, by_name: bool) -> FrameType | None:
    """Return the frame of the script's only suspended generator whose function is named so, or else of the only one."""
    every = gc.get_objects()
    if len(every) > MOST_LIVE_OBJECTS:
        return None
    generators = [each for each in every if type(each) is GeneratorType and each.gi_suspended]
    found = [each for each in generators if code_owner(each.gi_code.co_filename) == "own"]
    named = [each for each in found if each.gi_code.co_name in names]
    frames = [each.gi_frame for each in named or ([] if by_name else found)]
    return frames[0] if len(frames) == 1 else None


@lru_cache(maxsize=1024)
def _line_of(code: CodeType, instruction: int) -> int:
    return next(islice(code.co_positions(), instruction // 2, None), (0,))[0] or 0


def own_caller(frame: FrameType) -> FrameType | None:
    """Return the innermost frame of the script's own code that led to a frame."""
    outer = frame.f_back
    while outer is not None and code_owner(outer.f_code.co_filename) != "own":
        outer = outer.f_back
    return outer


def _is_bad(value: Any) -> bool:
    return any(tensor.is_floating_point() and not is_finite(tensor) for tensor in tensors_in(value))


def _has_graph(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_graph, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.grad_fn is not None


# The source


@lru_cache(maxsize=256)
def _slice(
    code: CodeType, instruction: int, first_line: int, wanted: _Wanted, own: str | None, at_hand: frozenset[str]
) -> Slice | None:
    """Return the statements of a function that compute the loss, or arguments, of the call that it is running.

    They begin at ``first_line``, or else at the innermost loop around the call. own: the name of ``self``. at_hand:
    names whose values need not be computed again.
    """
    tree = _tree(code.co_filename)
    position = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    way = None if tree is None or None in position else _way_to(tree, position)
    if way is None:
        return None
    call = way[-1]
    assert isinstance(call, USES)
    function = next((node for node in reversed(way) if isinstance(node, FUNCTIONS)), None)
    inside = way[way.index(function) + 1 if function is not None else 1 :]
    if any(isinstance(node, ast.Lambda) for node in inside):
        return None
    parameters: frozenset[str] = frozenset()
    if function is not None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters = frozenset(each.arg for each in arguments)
    found = [each.in_caller(call, own) for each in wanted] if wanted else [_loss_of(call)]
    expressions = [each for each in found if each is not None and not isinstance(each, ast.Constant)]
    if len(expressions) < len(found):  # exec("..."): it has no file
        return None
    loops = [number for number, node in enumerate(inside) if isinstance(node, (*LOOPS, *COMPREHENSIONS))]
    root: ast.AST = inside[loops[-1]] if loops else (function or way[0])
    chain = [node for node in inside[loops[-1] + 1 if loops else 0 :] if isinstance(node, ast.stmt)]
    value = ast.Tuple(expressions, ast.Load()) if wanted else expressions[0]
    result = ast.Assign(targets=[ast.Name(RESULT, ast.Store())], value=value)
    ast.copy_location(result, call)
    cls = next((node for node in reversed(way) if isinstance(node, ast.ClassDef)), None)
    reader = _Reader(own, first_line, {} if own is None or cls is None else _attributes_set(cls), at_hand)
    needed: set[str] = set()
    reader.need(free_names(value, own), needed)
    body = reader.statements_before(root, chain, needed, result)
    needed |= reader.taken
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    if any(isinstance(node, NEEDS_ITS_FUNCTION) or _needs_its_class(node) for node in ast.walk(module)):
        return None
    attributes = {name for name in needed if name.startswith("self.")}
    names = (needed - attributes) | ({own} if own is not None and attributes else set())
    target, iterated = _item_of(root)
    try:
        compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
        take_item = None if target is None else compile(_assigned_item(target), code.co_filename, "exec")
    except (SyntaxError, ValueError):  # such as `break` outside of its loop
        return None
    return Slice(
        code=compiled,
        names=tuple(sorted(names)),
        parameters=parameters,
        attributes=tuple(sorted(name.removeprefix("self.") for name in attributes)),
        loop_target=frozenset() if target is None else frozenset(bound_names(target)),
        take_item=take_item,
        iterates=frozenset(name for each in ast.walk(iterated) if (name := _name_in(each)))
        if iterated
        else frozenset(),
        rebound=frozenset(names.intersection(set().union(*(bound_names(each, own) for each in body)))),
    )


def _item_of(loop: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """Return what a loop sets to items, and what these come from: for ``for i, x in enumerate(y)``, x and y."""
    if isinstance(loop, COMPREHENSIONS):
        if len(loop.generators) != 1:
            return None, None
        target, iterated = loop.generators[0].target, loop.generators[0].iter
    elif isinstance(loop, ast.For | ast.AsyncFor):
        target, iterated = loop.target, loop.iter
    else:
        return None, None
    while isinstance(iterated, ast.Call) and iterated.args:
        name = _name_in(iterated.func)
        if name == "zip":
            return None, None
        if name == "enumerate":
            if not isinstance(target, ast.Tuple | ast.List) or len(target.elts) != 2:
                return None, None
            target = target.elts[1]
        elif name not in PROGRESS:
            break
        iterated = iterated.args[0]
    return target, iterated


def _name_in(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _assigned_item(target: ast.expr) -> ast.Module:
    assigned = ast.Assign(targets=[target], value=ast.Name(ITEM, ast.Load()))
    ast.copy_location(assigned, target)
    return ast.fix_missing_locations(ast.Module(body=[assigned], type_ignores=[]))


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
        if isinstance(inner, USES) and position == (
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


def _loss_of(call: ast.Call | ast.Yield | ast.Compare) -> ast.expr | None:
    """Return the loss in ``loss.backward()``, ``accelerator.backward(loss)``, ``scaler.scale(loss).backward()`` ..."""
    if isinstance(call, ast.Compare):
        return call.comparators[0] if isinstance(call.left, ast.Constant) else call.left
    if isinstance(call, ast.Yield):
        return None
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
    at_hand: frozenset[str] = frozenset()  # names whose values need not be computed again
    taken: set[str] = field(default_factory=set)  # those of them that are read
    rebound: set[str] = field(default_factory=set)  # names that the statements found so far set: their value is gone

    def need(self, names: set[str], needed: set[str]) -> None:
        """Add names that are read to those that are needed, unless their values are at hand."""
        self.taken |= names & (self.at_hand - self.rebound)
        needed |= names - (self.at_hand - self.rebound)

    def statements_before(
        self, root: ast.AST, chain: Sequence[ast.stmt], needed: set[str], result: ast.stmt
    ) -> list[ast.stmt]:
        """Return the statements on the way to the call that define needed names, in order; ``needed`` grows.

        chain: the statements around the call, outermost first. A ``with`` around the call is entered again; of an
        ``if`` or a ``try`` only the block that runs is left.
        """
        body: list[ast.stmt] = [result]
        around = [root, *chain[:-1]] if chain else []  # none in a comprehension
        for outer, inner in zip(reversed(around), reversed(chain), strict=True):
            blocks = [block for block in _blocks(outer) if inner in block]
            before = blocks[0][: blocks[0].index(inner)] if blocks else []
            body = [*self.needed_of(before, needed), *body]
            if isinstance(outer, ast.With | ast.AsyncWith) and outer is not root:
                body = self.entered(outer, body, needed)
        return body

    def entered(self, block: ast.With | ast.AsyncWith, body: list[ast.stmt], needed: set[str]) -> list[ast.stmt]:
        for item in block.items:
            self.need(free_names(item.context_expr, self.own), needed)
        return [ast.copy_location(ast.With(items=block.items, body=body), block)]

    def needed_of(self, statements: Sequence[ast.stmt], needed: set[str]) -> list[ast.stmt]:
        kept: list[ast.stmt] = []
        for statement in reversed(statements):
            if isinstance(statement, ast.Global | ast.Nonlocal):
                continue
            bound = bound_names(statement, self.own)
            if (statement.end_lineno or 0) < self.first_line and needed.isdisjoint(bound & self.rebound):
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
            if needed.isdisjoint(bound | changes):
                continue
            self.rebound |= bound
            reads, always_bound = self.names_of(statement)
            needed -= always_bound
            self.need(reads, needed)
            needed -= {name for name in changes if name.startswith("self.")} - reads
            kept.insert(0, statement)
        return kept

    def names_of(self, statement: ast.stmt) -> tuple[set[str], set[str]]:
        """Return the names that a statement reads before it sets them, and those that it always sets."""
        if isinstance(statement, ast.For | ast.AsyncFor):
            target = bound_names(statement.target, self.own)
            read, _ = self.names_of_block(statement.body)
            after, _ = self.names_of_block(statement.orelse)
            outside = free_names(statement.iter, self.own) | free_names(statement.target, self.own)
            return outside | (read - target) | after, target
        if isinstance(statement, ast.If):
            read, bound = self.names_of_block(statement.body)
            other, also = self.names_of_block(statement.orelse)
            return free_names(statement.test, self.own) | read | other, bound & also
        if isinstance(statement, ast.With | ast.AsyncWith):
            read, bound = self.names_of_block(statement.body)
            names = set().union(*(bound_names(item, self.own) for item in statement.items))
            outside = set().union(*(free_names(item, self.own) for item in statement.items))
            return outside | (read - names), bound | names
        always = isinstance(statement, ast.Assign | ast.AnnAssign)
        return free_names(statement, self.own), bound_names(statement, self.own) if always else set()

    def names_of_block(self, statements: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
        reads: set[str] = set()
        bound: set[str] = set()
        for statement in statements:
            read, always = self.names_of(statement)
            reads |= read - bound
            bound |= always
        return reads, bound


def _blocks(node: ast.AST) -> Iterable[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        yield part.body
