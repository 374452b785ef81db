"""The statements of a script that a value depends on, from all functions on the way, in an order that runs.

A slice begins at one line, that of ``loss.backward()``, with the names used there. Going backwards, statements that
define a needed name are taken, and what they use is needed too. Parameters come from the call of the function,
``self.x`` from where the class sets it. The slice ends at the batch: the target of the loop over the data.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ampwise.trace.names_in_code import (
    BUILTINS,
    DEFINITIONS,
    FUNCTIONS,
    Scope,
    bound_names,
    call_name,
    calls_in,
    changed_names,
    free_names,
)

END = 10**9  # after the last line of any script
COUNTERS = {"range", "count", "trange"}
LOOP_WRAPPERS = {"enumerate", "tqdm", "zip", "iter", "islice", "track", "log_every"}
# Calls that return the model they are given, for several devices or faster: ampwise decides on these.
WRAPPERS = {
    *("DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP", "fully_shard", "compile"),
    *("prepare", "prepare_model", "initialize", "setup", "convert_sync_batchnorm", "script", "replicate"),
}
# Contexts that the result depends on; autocast is what ampwise chooses.
KEPT_CONTEXTS = ("grad", "inference", "open", "init", "device", "seed")
Compound = ast.If | ast.Try | ast.With | ast.AsyncWith


@dataclass(slots=True)
class Batch:
    """Where the script gets a batch: the names it has, and the expression that yields it."""

    names: list[str]
    target: ast.expr
    value: ast.expr
    line: int


@dataclass(slots=True)
class Demand:
    """The names needed of a scope at a line, and the statements that give them."""

    names: set[str] = field(default_factory=set)
    until: int = 0
    kept: list[ast.stmt] = field(default_factory=list)
    bindings: list[ast.stmt] = field(default_factory=list)
    providers: list[Scope] = field(default_factory=list)


class Slicer:
    """A slice of one script. With ``copied``, statements at its top level are part of it; else their names are."""

    def __init__(self, scopes: Sequence[Scope], *, copied: bool, with_data: bool) -> None:
        self.scopes, self.copied, self.with_data = scopes, copied, with_data
        self.module_names: set[str] = set()  # names that are needed of the script's top level
        self.batch: Batch | None = None
        self.missing: dict[str, str] = {}  # name: why
        self._demands: dict[Scope, Demand] = {}
        self._loop_names: set[str] = set()  # targets of loops over data
        imports = [node for node in ast.walk(scopes[0].node) if isinstance(node, ast.Import | ast.ImportFrom)]
        self._imported = {name for node in imports for name in bound_names(node)}

    def slice(self, scope: Scope, names: set[str], until: int) -> list[tuple[ast.stmt, bool]]:
        """Slice from a line in a scope; return statements, each with whether it is at the script's top level."""
        self._ask(scope, names, until)
        while True:  # each round can only add names and lines
            before = {each: (len(demand.names), demand.until) for each, demand in self._demands.items()}
            for each in list(self._demands):
                self._settle(each)
            if before == {each: (len(demand.names), demand.until) for each, demand in self._demands.items()}:
                break
        found: list[tuple[ast.stmt, bool]] = []
        done: set[Scope] = set()

        def emit(each: Scope) -> None:
            demand = self._demands.get(each)
            if demand is None or each in done:
                return
            done.add(each)
            for provider in demand.providers:
                emit(provider)
            found.extend((stmt, each.is_module) for stmt in (*demand.bindings, *demand.kept))

        emit(self.scopes[0])
        emit(scope)
        return found

    def _ask(self, scope: Scope, names: set[str], until: int, by: Scope | None = None) -> None:
        """Need names of a scope at a line; ``by`` is the scope that uses them, and comes after it."""
        demand = self._demands.setdefault(scope, Demand())
        demand.names |= names
        demand.until = max(demand.until, until)
        if by is not None and scope not in self._demands[by].providers:
            self._demands[by].providers.append(scope)

    def _settle(self, scope: Scope) -> None:
        """Take what a scope is asked for, and ask others for the rest."""
        demand = self._demands[scope]
        demand.providers, demand.bindings = [], []
        if scope.is_module:
            self._settle_module(scope, demand)
            return
        needs = set(demand.names)
        demand.kept = self._block(scope, scope.body, needs, demand.until)
        parameters = {name for name in needs if name in scope.parameters and name != scope.own}
        fields = {name for name in needs if name.startswith("self.")}
        for name in sorted(fields - set().union(*(bound_names(stmt, scope.own) for stmt in scope.body))):
            self._find_field(scope, name)
        self._bind(scope, parameters)
        if scope.own is not None and scope.own in needs:
            self.missing[scope.own] = f"an object of the class {scope.cls.name if scope.cls else ''} itself"
        declared = {
            name for node in ast.walk(scope.node) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
        }
        local = set().union(*(bound_names(stmt) for stmt in scope.body)) - declared
        outer = needs - parameters - fields - BUILTINS - local - {scope.own}
        if scope.parent is not None and outer:
            # A function within a function sees what is defined before it; at the top level it runs later.
            nested = not scope.parent.is_module and scope.cls is None
            self._ask(scope.parent, outer, getattr(scope.node, "lineno", END) if nested else END, by=scope)

    def _settle_module(self, scope: Scope, demand: Demand) -> None:
        needs = set(demand.names)
        if self.copied:
            # Training begins with the first statement that calls a function which is part of the slice.
            part_of = {each.name for each in self._demands if isinstance(each.node, FUNCTIONS)}
            part_of |= {each.cls.name for each in self._demands if each.cls is not None}
            starts = [
                stmt.lineno
                for stmt in scope.body
                if not isinstance(stmt, ast.Assign) and any(call_name(call) in part_of for call in calls_in(stmt))
            ]
            until, used = min([demand.until, *starts]), set[str]()
            while True:  # a function may use names that are defined below it
                needs = demand.names | used
                demand.kept = self._block(scope, scope.body, needs, until)
                more = {name for stmt in demand.kept if isinstance(stmt, DEFINITIONS) for name in free_names(stmt)}
                if more <= used:
                    break
                used |= more
        self.module_names |= needs

    def _bind(self, scope: Scope, names: set[str]) -> None:
        """Give parameters the values of the first call of the function."""
        caller, call = self._call_of(scope) if names else (None, None)
        given = _arguments(scope, call) if call is not None else {}
        for name in sorted(names):
            value = given.get(name) or scope.parameters[name]
            if value is None:
                line = getattr(scope.node, "lineno", 0)
                self.missing[name] = f"line {line}: no call of {scope.name}() in the script gives it"
                continue
            self.missing.pop(name, None)
            if caller is not None and call is not None and name in given:
                self._ask(caller, free_names(value, caller.own), call.lineno, by=scope)
            if not (isinstance(value, ast.Name) and value.id == name):
                self._demands[scope].bindings.append(_assign(ast.Name(name, ast.Store()), value, value))

    def _call_of(self, scope: Scope) -> tuple[Scope | None, ast.Call | None]:
        """The first call of a function, or of its class for ``__init__``, that gives it what it requires."""
        is_method = scope.cls is not None and scope.name != "__init__"
        name = scope.cls.name if scope.cls is not None and not is_method else scope.name
        required = {each for each, default in scope.parameters.items() if default is None} - {scope.own}
        calls = [(caller, call) for caller in self.scopes for stmt in caller.body for call in calls_in(stmt)]
        for caller, call in calls:
            if call_name(call) == "spawn" and call.args and ast.unparse(call.args[0]) == name:
                given = next((word.value for word in call.keywords if word.arg == "args"), None)
                rest = given.elts if isinstance(given, ast.Tuple) else []  # one process for each rank
                rank = ast.copy_location(ast.Constant(0), call)
                return caller, ast.copy_location(ast.Call(call.func, [rank, *rest], []), call)
            if caller is scope or call_name(call) != name or isinstance(call.func, ast.Attribute) != is_method:
                continue
            if required <= _arguments(scope, call).keys():  # not `optimizer.step()` for `def step(self, batch)`
                return caller, call
        return None, None

    def _find_field(self, scope: Scope, name: str) -> None:
        """Ask the method that sets ``self.x`` for it."""
        methods = [each for each in self.scopes if each.cls is scope.cls and each is not scope]
        methods.sort(key=lambda each: each.name != "__init__")
        for method in methods:
            if any(name in bound_names(stmt, method.own) for stmt in method.body):
                self._ask(method, {name}, END, by=scope)
                return
        what = "a method" if any(f"self.{each.name}" == name for each in methods) else "not set"
        self.missing[name] = f"{what} in class {scope.cls.name if scope.cls else '?'}"

    def _block(self, scope: Scope, body: list[ast.stmt], needs: set[str], until: int) -> list[ast.stmt]:
        """Take the statements that define what is needed, last first; ``needs`` becomes what is still needed."""
        kept: list[ast.stmt] = []
        for stmt in reversed(body):
            if isinstance(stmt, DEFINITIONS):
                if scope.is_module or stmt.lineno < until:
                    kept[:0] = self._whole(scope, stmt, needs)
            elif (stmt.end_lineno or stmt.lineno) < until:
                kept[:0] = self._whole(scope, stmt, needs)
            elif stmt.lineno < until:
                kept[:0] = self._enclosing(scope, stmt, needs, until)
        return kept

    def _enclosing(self, scope: Scope, stmt: ast.stmt, needs: set[str], until: int) -> list[ast.stmt]:
        """The part of a compound statement that leads to the line: its block, without the statement around it."""
        own = scope.own
        if isinstance(stmt, ast.For | ast.AsyncFor):
            targets = bound_names(stmt.target, own)
            counts = call_name(unwrapped_loop(stmt.iter)) in COUNTERS
            self._loop_names |= set() if counts else targets
            kept = self._block(scope, stmt.body, needs, until)
            wanted = needs & targets
            if not wanted:
                return kept
            needs -= targets
            first = ast.parse("next(iter(x))", mode="eval").body  # what the loop does first
            first.args[0].args[0] = stmt.iter  # type: ignore[attr-defined]
            if not counts and self._is_batch(stmt.lineno):
                self._set_batch(wanted, stmt.target, first, stmt.lineno)
                needs |= free_names(stmt.iter, own) if self.with_data else set()
                return kept
            needs |= free_names(stmt.iter, own)
            return [_assign(stmt.target, first, stmt), *kept]

        blocks = [getattr(stmt, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [each.body for each in (*getattr(stmt, "handlers", []), *getattr(stmt, "cases", []))]
        inside = [block for block in blocks if block and block[0].lineno <= until <= (block[-1].end_lineno or 0)]
        kept = self._block(scope, inside[0], needs, until) if inside else []
        for item in stmt.items if isinstance(stmt, ast.With | ast.AsyncWith) else []:
            if item.optional_vars is not None and bound_names(item.optional_vars, own) & needs:
                value = item.context_expr
                if isinstance(value, ast.Call) and value.args and call_name(value) in {"scale_loss", *LOOP_WRAPPERS}:
                    value = value.args[0]  # apex's scale_loss(loss, optimizer), tqdm(loader)
                needs -= bound_names(item.optional_vars, own)
                needs |= free_names(value, own)
                kept.insert(0, _assign(item.optional_vars, value, stmt))
        return kept

    def _is_batch(self, line: int) -> bool:
        """Whether what a line yields is the batch: it is the first such line that is met."""
        return self.batch is None or self.batch.line == line

    def _set_batch(self, names: set[str], target: ast.expr, value: ast.expr, line: int) -> None:
        names |= set(self.batch.names) if self.batch else set()
        order = {each.id: index for index, each in enumerate(ast.walk(target)) if isinstance(each, ast.Name)}
        self.batch = Batch(sorted(names, key=lambda name: order.get(name, END)), target, value, line)

    def _whole(self, scope: Scope, stmt: ast.stmt, needs: set[str]) -> list[ast.stmt]:
        """The statement, or the parts of it that define something needed."""
        own = scope.own
        bound, changed = bound_names(stmt, own), changed_names(stmt, own) - self._imported
        if isinstance(stmt, ast.Expr) and ast.unparse(stmt).startswith("sys.path."):
            changed = {"sys"} if self._imported & needs else set()
            needs |= changed
        if not (bound | changed) & needs or _is_wrapper(stmt):
            return []
        if isinstance(stmt, Compound):
            return self._compound(scope, stmt, needs)
        uses = free_names(stmt, own)
        if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call):
            name, given = call_name(stmt.value), free_names(stmt.value, own)
            yields = name == "next" or (name.lower().endswith("batch") and name[:1].islower())  # get_batch("train")
            if yields and not given & (self._loop_names | bound):  # not x = normalize_batch(x)
                if self._is_batch(stmt.lineno):
                    self._set_batch(bound & needs, stmt.targets[0], stmt.value, stmt.lineno)
                if self.batch is not None and ast.dump(self.batch.target) == ast.dump(stmt.targets[0]):
                    needs -= bound
                    needs |= given if self.with_data else set()
                    return []
        replaces = isinstance(stmt, ast.Assign) and all(isinstance(each, ast.Name) for each in stmt.targets)
        if not scope.is_module and (
            isinstance(stmt, DEFINITIONS) or (replaces and not changed and not uses & bound)
        ):  # functions of a module may use what it defined before
            needs -= bound
        needs |= uses
        return [stmt]

    def _compound(self, scope: Scope, stmt: Compound, needs: set[str]) -> list[ast.stmt]:
        """An if, try or with, with only what is needed in each of its blocks."""
        after, copy = set(needs), _shallow(stmt)

        def block(body: list[ast.stmt]) -> list[ast.stmt]:
            inner = set(after)
            kept = self._block(scope, body, inner, END)
            if isinstance(stmt, ast.If) and isinstance(body[-1], ast.Raise):  # it says what is missing
                kept.append(body[-1])
                inner |= free_names(body[-1], scope.own)
            needs.update(inner)
            return kept

        for name in ("body", "orelse", "finalbody"):
            if getattr(stmt, name, None):
                setattr(copy, name, block(getattr(stmt, name)))
        if isinstance(stmt, ast.Try):
            copy.handlers = [_shallow(each) for each in stmt.handlers]
            for handler in copy.handlers:
                handler.body = block(handler.body) or [ast.Pass()]
                needs |= free_names(handler.type, scope.own) if handler.type else set()
        if all(isinstance(each, ast.Raise) for each in (*copy.body, *getattr(copy, "orelse", []))):
            return list(getattr(copy, "finalbody", []))
        if isinstance(stmt, ast.With | ast.AsyncWith):
            named = set().union(*(bound_names(each.optional_vars) for each in stmt.items if each.optional_vars))
            called = [call_name(each.context_expr).lower() for each in stmt.items]
            if not named & needs and not any(word in name for name in called for word in KEPT_CONTEXTS):
                return list(copy.body)
        heads = [stmt.test] if isinstance(stmt, ast.If) else [each.context_expr for each in getattr(stmt, "items", [])]
        needs.update(*(free_names(head, scope.own) for head in heads))
        copy.body = copy.body or [ast.copy_location(ast.Pass(), stmt)]
        return [copy]


def unwrapped_loop(node: ast.expr) -> ast.expr:
    """What a loop goes over: ``loader`` for ``enumerate(tqdm(loader))``."""
    while isinstance(node, ast.Call) and call_name(node) in LOOP_WRAPPERS and node.args:
        node = node.args[0]
    return node


def _arguments(scope: Scope, call: ast.Call) -> dict[str, ast.expr]:
    """Arguments of a call by the names of the function's parameters."""
    order = [name for name in scope.parameters if name != scope.own]
    given = (
        {} if any(isinstance(each, ast.Starred) for each in call.args) else dict(zip(order, call.args, strict=False))
    )
    return given | {word.arg: word.value for word in call.keywords if word.arg}


def _shallow(node: Any) -> Any:
    return ast.copy_location(type(node)(**dict(ast.iter_fields(node))), node)


def _assign(target: ast.expr, value: ast.expr, place: ast.stmt | ast.expr) -> ast.Assign:
    return ast.copy_location(ast.Assign([target], value), place)


def _is_wrapper(stmt: ast.stmt) -> bool:
    """Whether it only wraps what it assigns: ``model = DDP(model)``."""
    if not (isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call) and call_name(stmt.value) in WRAPPERS):
        return False
    given = {ast.unparse(each) for each in (*stmt.value.args, *(word.value for word in stmt.value.keywords))}
    targets = stmt.targets[0].elts if isinstance(stmt.targets[0], ast.Tuple) else stmt.targets
    return any(ast.unparse(each) in given for each in targets)
