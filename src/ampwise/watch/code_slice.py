"""Read from the source which statements of a function compute a value, such as a loss, and what they begin with."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any

from ampwise.trace.names_in_code import (
    COMPREHENSIONS,
    FUNCTIONS,
    bound_names,
    call_name,
    changed_names,
    free_names,
    tree_of,
)

__all__ = [
    "LOOPS",
    "RESULT",
    "Attribute",
    "Parameter",
    "Slice",
    "Wanted",
    "Yielded",
    "blocks_of",
    "loss_of",
    "needs_its_place",
    "slice_of",
    "statements_setting",
    "way_to",
]

RESULT = "__ampwise_result__"
ITEM = "__ampwise_item__"  # what a loop iterates over has given last
LOOPS = (ast.For, ast.AsyncFor, ast.While)
POSITION = ("lineno", "end_lineno", "col_offset", "end_col_offset")
USES = (ast.Call, ast.Yield, ast.Compare)  # of a value
PROGRESS = ("tqdm", "trange", "track", "iter", "list")  # what a script may wrap a loader in
RECEIVES_LOSS = ("backward", "item", "isnan", "isinf", "isfinite", "tolist", "numpy")
NEEDS_ITS_FUNCTION = (ast.Await, ast.Yield, ast.YieldFrom, ast.Return)  # cannot run elsewhere
NEEDS_ITS_BLOCK = (*NEEDS_ITS_FUNCTION, ast.Break, ast.Continue, ast.Global, ast.Nonlocal)


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
class Parameter:
    """A parameter of a function that the script has called."""

    name: str
    place: int | None  # its position; None: by keyword only
    is_method: bool

    @classmethod
    def of(cls, code: CodeType, name: str, *, is_method: bool) -> Parameter:
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
class Attribute:
    """An attribute of ``self`` that another method of the same object has set."""

    name: str

    def in_caller(self, call: ast.expr, own: str | None) -> ast.expr | None:
        if own is None:
            return None
        return ast.copy_location(ast.Attribute(ast.Name(own, ast.Load()), self.name, ast.Load()), call)


@dataclass(frozen=True, slots=True)
class Yielded:
    """What a generator has yielded to a loop."""

    name: str = ITEM

    def in_caller(self, yielded: ast.expr, own: str | None) -> ast.expr | None:
        return yielded.value if isinstance(yielded, ast.Yield) else yielded  # of a generator expression


Wanted = tuple[Parameter | Attribute | Yielded, ...]


def _is_called_on_class(call: ast.Call) -> bool:
    func = call.func
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id[:1].isupper()


@lru_cache(maxsize=256)
def slice_of(
    code: CodeType, instruction: int, first_line: int, wanted: Wanted, own: str | None, at_hand: frozenset[str]
) -> Slice | None:
    """Return the statements of a function that compute the loss, or arguments, of the call that it is running.

    They begin at ``first_line``, or else at the innermost loop around the call. own: the name of ``self``. at_hand:
    names whose values need not be computed again.
    """
    tree = tree_of(code.co_filename)
    position = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    way = None if tree is None or None in position else way_to(tree, position)
    if way is None:
        return None
    call = way[-1]
    assert isinstance(call, ast.expr)
    function = next((node for node in reversed(way) if isinstance(node, (*FUNCTIONS, ast.Lambda))), None)
    inside = way[way.index(function) + 1 if function is not None else 1 :]
    parameters: frozenset[str] = frozenset()
    if function is not None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters = frozenset(each.arg for each in arguments)
    found = [each.in_caller(call, own) for each in wanted] if wanted else [loss_of(call)]
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
        take_item = None
        if target is not None:
            assigned = ast.copy_location(ast.Assign([target], ast.Name(ITEM, ast.Load())), target)
            assigning = ast.fix_missing_locations(ast.Module([assigned], []))
            take_item = compile(assigning, code.co_filename, "exec")
    except (SyntaxError, ValueError):  # such as `break` outside of its loop
        return None
    return Slice(
        code=compiled,
        names=tuple(sorted(names)),
        parameters=parameters,
        attributes=tuple(sorted(name.removeprefix("self.") for name in attributes)),
        loop_target=frozenset() if target is None else frozenset(bound_names(target)),
        take_item=take_item,
        iterates=frozenset(map(call_name, ast.walk(iterated))) - {""} if iterated is not None else frozenset(),
        rebound=frozenset(names.intersection(set().union(*(bound_names(each, own) for each in body)))),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """Statements that set what an expression reads, from the beginning of a function on."""

    body: list[ast.stmt]
    names: frozenset[str]  # whose values they begin with
    rebound: frozenset[str]  # those of them that they set: the first values are gone


def statements_setting(
    way: Sequence[ast.AST], wanted: ast.expr, own: str | None, at_hand: frozenset[str]
) -> Setting | None:
    """Return the statements before a call that set what an expression reads; None if they cannot run elsewhere.

    way: to the call, from the whole file on; only the file, if all of it has run. own, at_hand: see ``slice_of``.
    """
    function = max([-1, *(n for n, node in enumerate(way) if isinstance(node, (*FUNCTIONS, ast.Lambda)))])
    inside = list(way[function + 1 if function >= 0 else 1 :])
    root = way[max(function, 0)]
    cls = next((node for node in reversed(way) if isinstance(node, ast.ClassDef)), None)
    reader = _Reader(own, 0, {} if own is None or cls is None else _attributes_set(cls), at_hand)
    needed: set[str] = set()
    reader.need(free_names(wanted, own), needed)
    if own is not None and isinstance(wanted, ast.Attribute):
        needed.add(f"{own}.{wanted.attr}")
    chain = [node for node in inside if isinstance(node, ast.stmt)]
    body: list[ast.stmt] = []
    from_loops: set[str] = set()  # names that a loop around the call has set
    for outer, inner in zip(reversed([root, *chain[:-1]]), reversed(chain), strict=True) if chain else ():
        block = next((block for block in blocks_of(outer) if inner in block), [])
        body = [*reader.needed_of(block[: block.index(inner)] if block else [], needed), *body]
        if isinstance(outer, ast.With | ast.AsyncWith) and outer is not root:
            body = reader.entered(outer, body, needed) if body else body
        if isinstance(outer, ast.For | ast.AsyncFor) and outer is not root:
            from_loops |= needed & bound_names(outer.target, own)
            needed -= from_loops
    if not chain:  # a module that has run
        body = reader.needed_of([each for each in getattr(root, "body", ()) if not _is_main(each)], needed)
    module = ast.Module(body=body, type_ignores=[])
    if any(isinstance(node, NEEDS_ITS_FUNCTION) or _needs_its_class(node) for node in _outside_functions(module)):
        return None
    names = frozenset(needed | reader.taken | from_loops)
    return Setting(body, names, names & set().union(*(bound_names(each, own) for each in body)))


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a piece of code without those of the functions that it defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from _outside_functions(child)


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
        name = call_name(iterated)
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


def needs_its_place(statement: ast.stmt) -> bool:
    """Return whether a statement cannot run outside of its function, its block or its class."""
    return any(isinstance(node, NEEDS_ITS_BLOCK) or _needs_its_class(node) for node in ast.walk(statement))


def _needs_its_class(node: ast.AST) -> bool:
    """Return whether a node works only inside of its class: ``super()``, or a name that Python mangles."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    name = call_name(node)
    return name.startswith("__") and not name.endswith("__")


def way_to(tree: ast.Module, position: tuple[int | None, ...]) -> list[ast.AST] | None:
    """Return the nodes from the whole file to the call at a position; None if there is none."""
    way: list[ast.AST] = [tree]
    found = None
    while True:
        inner = next((child for child in ast.iter_child_nodes(way[-1]) if _contains(child, position)), None)
        if inner is None:
            return found
        is_item = isinstance(way[-1], ast.GeneratorExp) and inner is way[-1].elt
        way.append(inner)
        if position == tuple(getattr(inner, name, None) for name in POSITION):
            if is_item or isinstance(inner, USES):
                found = list(way)
            elif isinstance(inner, ast.GeneratorExp):  # where it yields an item, before Python 3.12
                found = [*way, inner.elt]


def _contains(node: Any, position: tuple[Any, ...]) -> bool:
    if not hasattr(node, "lineno"):  # an item of a `with`, arguments, a `case`: as large as its parts
        return any(_contains(part, position) for part in ast.iter_child_nodes(node))
    line, end_line, column, end_column = position
    start = (node.lineno, node.col_offset)
    for decorator in getattr(node, "decorator_list", ()):
        start = min(start, (decorator.lineno, 0))
    return start <= (line, column) and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def loss_of(call: ast.expr) -> ast.expr | None:
    """Return the loss in ``loss.backward()``, ``accelerator.backward(loss)``, ``scaler.scale(loss).backward()`` ..."""
    if isinstance(call, ast.Compare):
        return call.comparators[0] if isinstance(call.left, ast.Constant) else call.left
    if not isinstance(call, ast.Call):
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
            blocks = [block for block in blocks_of(outer) if inner in block]
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
            self.taken -= always_bound  # what comes later reads what the statement gives, also where that is finite
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


def blocks_of(node: ast.AST) -> Iterable[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        yield part.body
