from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from ampwise.check.source.call_events import HARMLESS, MODULE_METHODS
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.trained_parameters import frozen_in
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import NO_GRAD
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile

RULE = Rule(
    code="AMP320",
    name="bypassed-wrapper",
    severity=Severity.ERROR,
    summary="A training forward calls the module inside DDP, FSDP or Accelerate's wrapper, not the wrapper.",
    why=(
        "The wrapper's own forward arms the gradient all-reduce (DDP), gathers the sharded parameters (FSDP) and "
        "enters autocast (Accelerate). `model.module(x)` and `model.module.loss(x)` do none of that: with DDP each "
        "rank steps on its own gradients and the weights of the ranks drift apart, without an error; with FSDP the "
        "forward reads shards instead of weights."
    ),
    fix="Call the wrapped model. For another method, make the module's forward() call it.",
    bad="model = DistributedDataParallel(model)\nloss = model.module.loss(x, y)\nloss.backward()",
    good="model = DistributedDataParallel(model)  # forward() returns the loss\nloss = model(x, y)\nloss.backward()",
)
NEEDS = (
    ("backward(", "rainer("),
    ("DistributedDataParallel", "FullyShardedDataParallel", "Accelerator"),
)

DDP, FSDP, PREPARED = "DistributedDataParallel", "FullyShardedDataParallel", "the prepared model"
INNER = ("module", "_fsdp_wrapped_module")
UNWRAPS = LazyPattern(r"^_?(unwrap(_(ddp|dist|distributed))?(_model)?|de_parallel|extract_model_from_parallel)$")
NOT_TRAINED = LazyPattern(
    r"(^|_)(ema|swa|averaged?|avg|teacher|target|frozen)(_|$)|^(self|cls)$"
)  # not a trained wrapper
# The script averages gradients itself.
OWN_AVERAGE = LazyPattern(r"all_?reduce\w*\([^\n]*grad|(average|(all_?)?reduce|synchroni[sz]e)_\w*grad|sync_grad\w*\(")
TARGETS = LazyPattern(r"(^|_)(labels?|targets?|gt|ground_truth|y_true)$")
ON_PURPOSE = LazyPattern(r"sync|accum|%|is_last|boundary|micro")  # only the last micro-batch goes through the wrapper
SUMMONS = ("summon_full_params", "unshard")  # inside, FSDP's parameters are whole
AROUND_A_STEP = ("accumulate", "no_sync", "join_uneven_inputs")  # contexts of a wrapper that run no forward
ASSIGNMENTS = ast.Assign | ast.AnnAssign | ast.AugAssign
LOOPS = (ast.For, ast.AsyncFor, ast.While)
SAME_MODULE = frozenset(("to", "cuda", "train", "eval", "float", "requires_grad_"))  # methods that return their object
DEEPEST = 4  # functions that return what another one unwraps


class InnerName(NamedTuple):
    """Another name of a module that was wrapped, the line since which it holds that, and the wrapper's name."""

    name: str
    since: int
    outer: ast.expr


def check_source(code: SourceFile) -> Findings:
    frames = {function: code.frame(function) for function in code.outline.functions}
    calls: dict[FunctionOutline, list[ast.Call]] = {}
    wrappers: set[str] = set()  # what this file wraps models in
    renamed: dict[FunctionOutline, list[InnerName]] = {}
    for call in code.nodes(ast.Call):
        function = code.function_at(call)
        calls.setdefault(function, []).append(call)
        prepares = method_called(call) == "prepare" and "accelerat" in (dotted_text(call.func) or "")
        found = _wrapper_of(call.func, frames[function]) or (PREPARED if prepares else "")
        wrappers.add(found)
        for one in _inner_names(call, function, code) if found in (DDP, PREPARED) else ():
            renamed.setdefault(function, []).append(one)
            is_shared = function.owner is not None and one.name.startswith(f"{function.self_name}.")
            for home in function.owner.methods.values() if function.owner is not None and is_shared else ():
                if home is not function:
                    renamed.setdefault(home, []).append(one._replace(since=0))
    if DDP in wrappers and not OWN_AVERAGE.search(code.script.text):
        yield from _passed_to_training(code, calls)
    for function, own in calls.items():
        frame = frames[function]
        for call in own:
            held = {one.name: one.outer for one in renamed.get(function, ()) if one.since < call.lineno}
            outer, method = _inner_call(call, frame, held)
            name = dotted_text(outer) if outer is not None else None
            if outer is None or name is None or _is_frozen(name, code):
                continue
            tests = _tests(call, code, frame)
            if method and _prepares_targets(call, code):
                continue
            if any(ON_PURPOSE.search(ast.unparse(test)) for test in tests):
                continue
            kind = _tested_wrapper(tests, frame) or next(
                (kind for kind in (DDP, PREPARED, FSDP) if kind in wrappers), ""
            )
            if kind == FSDP and method in ("", "forward") and not _is_under(call, code, frame, SUMMONS):
                what = f"calls the module inside `{name}` (FSDP), whose parameters are shards here"
                yield RULE.at(code.script.place(call), what)
            elif kind in (DDP, PREPARED) and not _is_under(call, code, frame, NO_GRAD):
                end = _line_of_backward(call, function, calls, code)
                own_average = OWN_AVERAGE.search(code.script.text)
                anywhere = outer in held.values()  # `parallel(x) if distributed else model(x)`
                if end and not own_average and not _runs_wrapper(name, call, end, own, code, frame, anywhere):
                    what = f"calls the module inside `{name}`: past {kind}, gradients are not averaged over the ranks"
                    yield RULE.at(code.script.place(call), what)


def _is_frozen(name: str, code: SourceFile) -> bool:
    """Whether a model is not trained, by its name, or because the file freezes it or keeps it in evaluation mode."""
    last, text = name.rpartition(".")[2], code.script.text
    stays_in_eval = f"{last}.eval(" in text and f"{last}.train(" not in text
    return NOT_TRAINED.search(last) is not None or stays_in_eval or last in frozen_in(code)


def _prepares_targets(call: ast.Call, code: SourceFile) -> bool:
    """Whether a method only changes the targets of a loss: ``label = model.module.clamp(label)``."""
    statement = code.script.statement(call)
    names = {dotted_text(part) or "" for part in arguments_given(call)}
    held = dotted_text(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    return names == {held} and TARGETS.search(held or "") is not None


def _passed_to_training(code: SourceFile, calls: dict[FunctionOutline, list[ast.Call]]) -> Findings:
    """Yield the calls that pass ``model.module`` to a function or an object that runs it for a backward of its own."""
    named: dict[str, list[FunctionOutline]] = {}
    for function in code.outline.functions[1:]:
        named.setdefault(function.name, []).append(function)
    for function, own in calls.items():
        frame = code.frame(function)
        for call in own:
            inner = [(part, held) for part in arguments_given(call) if (held := _inner_passed(part, frame))]
            if len(inner) != 1 or _is_under(call, code, frame, NO_GRAD):
                continue
            part, outer = inner[0][0], dotted_text(inner[0][1])
            targets = named.get(last_name(call.func), [])
            target, owner = frame.callee(call) or (targets[0] if len(targets) == 1 else None, None)
            if target is None or outer is None or _is_frozen(outer, code):
                continue
            given = frame.enter(target, call, owner).arguments
            name = next((name for name, value in given.items() if value is part), None)
            gets_wrapper = any(dotted_text(other) == outer for other in arguments_given(call))
            if name is not None and not gets_wrapper and _trains(name, target, code.project.code(target.outline.path)):
                what = f"trains the module inside `{outer}`: past {DDP}, gradients are not averaged over the ranks"
                yield RULE.at(code.script.place(call), what)


def _inner_passed(node: ast.expr, frame: Frame) -> ast.expr | None:
    """Return the wrapper of ``model.module``, or of a name that was assigned it."""
    if isinstance(node, ast.Attribute):
        return node.value if node.attr in INNER else None
    return _outer_of(node, frame) if isinstance(node, ast.Name) else None


def _trains(name: str, function: FunctionOutline, code: SourceFile) -> bool:
    """Whether a function runs its parameter for a backward, or keeps it for a method of its object that does."""
    runs = [(name, function)]
    owner = function.owner
    if owner is not None and function.name == "__init__":
        for attribute, bindings in owner.attributes.items():
            if any(isinstance(one.value, ast.Name) and one.value.id == name for one in bindings):
                runs += [(f"{method.self_name}.{attribute}", method) for method in owner.methods.values()]
    for each, home in runs:
        calls = [part for part in walk(home.node) if isinstance(part, ast.Call)]
        if any(_is_run_for_backward(call, each, home, code) for call in calls):
            return True
    return False


def _is_run_for_backward(call: ast.Call, name: str, function: FunctionOutline, code: SourceFile) -> bool:
    """Whether a call of a module, or of a method of its own, leads to a backward in the same function."""
    func = call.func
    if isinstance(func, ast.Attribute) and dotted_text(func) != name and func.attr not in MODULE_METHODS and call.args:
        func = func.value
    is_run = dotted_text(func) == name
    return is_run and not _is_under(call, code, code.frame(function), NO_GRAD) and _follow(call, function, code)[0] > 0


def _wrapper_of(node: ast.expr, frame: Frame) -> str:
    """Return which wrapper a name is; an empty string for anything else."""
    name = (frame.qualified(node) or "") if isinstance(node, ast.Name | ast.Attribute) else ""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    return last if package in ("torch", "apex", "fairscale") and last in (DDP, FSDP) else ""


def _inner_names(wrap: ast.Call, function: FunctionOutline, code: SourceFile) -> Iterator[InnerName]:
    """Yield the names by which a module can still be called past the wrapper that a call makes.

    That is ``raw`` in ``raw = model``, ``model = DistributedDataParallel(torch.compile(model))``.
    """
    wrapping, above = code.script.statement(wrap), code.script.parents[wrap]
    while isinstance(above, ast.IfExp | ast.Attribute) or _is_same_module(
        above
    ):  # but not `[wrap(each) for each in ...]`
        above = code.script.parents[above]
    if not isinstance(wrapping, ast.Assign) or above is not wrapping:
        return
    plain = [node for node in walk(function.node) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    statements = sorted(plain, key=lambda node: node.lineno)
    targets = wrapping.targets[0].elts if isinstance(wrapping.targets[0], ast.Tuple) else wrapping.targets[:1]
    for part, outer in zip(wrap.args, targets, strict=False):
        inner, wrapper = _module_of(part), dotted_text(outer)
        if inner is None or wrapper is None:
            continue
        objects: dict[str, str] = {}  # what each name holds: the first name that it had
        since: dict[str, int] = {}
        through = {wrapper}  # names that hold the wrapper, at least in one branch
        for statement in statements:
            if statement is wrapping:
                wrapped = objects.get(inner, inner)
                names = [inner, *[name for name, held in objects.items() if held == wrapped]]
                since = dict.fromkeys(names, wrapping.lineno)
                continue
            source = _module_of(statement.value)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            name = dotted_text(target)
            if name is None:
                continue
            fresh = f"{name} of line {statement.lineno}"
            objects[name] = fresh if source is None else objects.setdefault(source, source)
            if since:
                read = {
                    dotted_text(node) for node in walk(statement.value) if isinstance(node, ast.Name | ast.Attribute)
                }
                through |= {name} if not read.isdisjoint(through) else set()
                since.pop(name, None)
                if source in since:
                    since[name] = statement.lineno
        yield from [InnerName(name, line, outer) for name, line in since.items() if name not in through]


def _module_of(node: ast.expr | None) -> str | None:
    """Return the name of the module that an expression is, also moved or compiled; None for another one."""
    while _is_same_module(node):
        node = node.args[0] if last_name(node.func) == "compile" else node.func.value  # type: ignore[attr-defined]
    if isinstance(node, ast.IfExp):
        arms = {_module_of(node.body), _module_of(node.orelse)}
        return arms.pop() if len(arms) == 1 else None
    return dotted_text(node) if node is not None else None


def _is_same_module(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Whether it is ``torch.compile(model)``, or a method that returns its own model."""
    if not isinstance(node, ast.Call):
        return False
    return method_called(node) in SAME_MODULE or (last_name(node.func) == "compile" and bool(node.args))


def _inner_call(call: ast.Call, frame: Frame, held: dict[str, ast.expr]) -> tuple[ast.expr | None, str]:
    """Return the wrapper whose inner module a call runs, and the method; None if it runs no inner module.

    ``held`` has the names of modules that were wrapped under another one, with their wrappers.
    """
    func = call.func
    if not call.args and not call.keywords:
        return None, ""
    outer = _outer_of(func, frame) or held.get((dotted_text(func) or "").removesuffix(".forward"))
    if outer is None and isinstance(func, ast.Attribute) and func.attr not in MODULE_METHODS:
        outer = _outer_of(func.value, frame)
        if outer is not None:
            return outer, func.attr
    target, owner = (frame.callee(call) if outer is None else None) or (None, None)
    if target is not None and target.name != "__init__":  # compute_loss(model.module, batch), which calls it
        for name, given in frame.enter(target, call, owner).arguments.items():
            outer = _outer_of(given, frame) or held.get(dotted_text(given) or "")
            parts = walk(target.node) if outer is not None else ()
            own = [part for part in parts if _runs(part, name)]
            code, inside = frame.lookup.code(target.outline.path), frame.lookup.frame(target)
            if not all(_is_under(part, code, inside, NO_GRAD) for part in own):
                return outer, target.name
        return None, ""
    return outer, ""


def _runs(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether a node calls a module of this name, or a part or a method of it that computes something."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return False
    func = node.func
    if isinstance(func, ast.Attribute) and func.attr not in MODULE_METHODS:
        return name in (dotted_text(func), dotted_text(func.value))
    return dotted_text(func) == name


def _outer_of(node: ast.expr, frame: Frame) -> ast.expr | None:
    """Return ``model`` for ``model.module``, ``unwrap_model(model)``, or a name that was assigned one of them."""
    if isinstance(node, ast.Attribute) and node.attr in INNER:
        return node.value
    if isinstance(node, ast.Call):
        if frame.qualified(node.func) == "typing.cast" and len(node.args) == 2:
            return _outer_of(node.args[1], frame)
        own = frame.definition(node.func)
        if own is None:
            return node.args[0] if UNWRAPS.search(last_name(node.func)) and len(node.args) == 1 else None
        return _unwrapped_by(own, node, frame) if isinstance(own, FunctionOutline) else None
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    for value, home in frame.values(node):
        if isinstance(value, ast.Attribute | ast.Call) and value is not node and home.function is frame.function:
            outer = _outer_of(value, home) if not isinstance(value, ast.Attribute) or value.attr in INNER else None
            # After `model = model.module` at the end of the training the name is the same.
            if outer is not None and dotted_text(outer) != dotted_text(node) and value.lineno < node.lineno:
                return outer
    return None


def _unwrapped_by(function: FunctionOutline, call: ast.Call, frame: Frame) -> ast.expr | None:
    """Return the argument whose inner module a function returns: ``return model.module if ... else model``."""
    inside = frame.enter(function, call, None)
    if len(inside.callers()) > DEEPEST:
        return None
    for part in walk(function.node):
        value = part.value if isinstance(part, ast.Return) else None
        for each in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            outer = _outer_of(each, inside) if isinstance(each, ast.Attribute | ast.Call) else None
            if isinstance(outer, ast.Name) and outer.id in inside.arguments:
                return inside.arguments[outer.id]
    return None


def _tests(call: ast.Call, code: SourceFile, frame: Frame) -> list[ast.expr]:
    """Return the tests around a call, and those that chose the name it calls."""
    tests = [outer.test for outer, inner in _outer_nodes(call, code) if isinstance(outer, ast.If | ast.IfExp)]
    chosen = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if isinstance(chosen, ast.Name):
        values = [binding.value for binding in frame.function.bindings.get(chosen.id, ())]
        tests += [value.test for value in values if isinstance(value, ast.IfExp)]
    return tests


def _tested_wrapper(tests: list[ast.expr], frame: Frame) -> str:
    """Return the wrapper that an ``isinstance`` asks for."""
    for part in (part for test in tests for part in walk(test)):
        if isinstance(part, ast.Call) and dotted_text(part.func) == "isinstance" and len(part.args) == 2:
            kinds = part.args[1].elts if isinstance(part.args[1], ast.Tuple) else [part.args[1]]
            found = [wrapper for kind in kinds if (wrapper := _wrapper_of(kind, frame))]
            if found:
                return found[0]
    return ""


def _outer_nodes(node: ast.AST, code: SourceFile) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes around a node in its function, each with its child on the way."""
    parents = code.script.parents
    while node in parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield parents[node], node
        node = parents[node]


def _is_under(call: ast.Call, code: SourceFile, frame: Frame, managers: tuple[str, ...]) -> bool:
    """Whether a call is in a ``with`` of one of these, or its function is decorated by one."""
    around = [*frame.function.decorators]
    for outer, _ in _outer_nodes(call, code):
        if isinstance(outer, ast.With | ast.AsyncWith):
            around += [item.context_expr for item in outer.items]
    for manager in around:
        func = manager.func if isinstance(manager, ast.Call) else manager
        if frame.qualified(func) in managers or last_name(func) in managers:
            return True
    return False


def _line_of_backward(
    call: ast.Call, function: FunctionOutline, calls: dict[FunctionOutline, list[ast.Call]], code: SourceFile
) -> int:
    """Return the line of the backward that the result of a call reaches, here or in a function that it is returned to.

    That is 0 if there is none, and the last line of the function if the backward is in another one.
    """
    line, is_returned = _follow(call, function, code)
    if line or not is_returned:
        return line
    callers = [(one, home) for home, own in calls.items() for one in own if last_name(one.func) == function.name]
    return function.lines[1] if any(_follow(one, home, code)[0] for one, home in callers) else 0


def _follow(call: ast.Call, function: FunctionOutline, code: SourceFile) -> tuple[int, bool]:
    """Return the line of the backward that the result of a call reaches in its function, or 0; or if it is returned."""
    first = code.script.statement(call)
    loop = next((outer for outer, _ in _outer_nodes(call, code) if isinstance(outer, LOOPS)), None)
    loop_end = (loop.end_lineno or 0) if loop is not None else function.lines[1]
    simple = [node for node in walk(function.node) if isinstance(node, ast.Expr | ast.Return | ASSIGNMENTS)]
    names: set[str | None] = set()  # those that hold the result, or what was computed from it
    for statement in sorted(simple, key=lambda node: node.lineno):
        if statement.lineno < first.lineno or code.function_at(statement) is not function:
            continue
        parts = list(walk(statement))
        held = [part for part in parts if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)]
        loaded = {dotted_text(part) for part in held if isinstance(part.ctx, ast.Load)}
        if statement is not first and loaded.isdisjoint(names):
            continue
        if any(method_called(part) == "backward" for part in parts):
            # Beyond its loop it is a rollout's or a buffer's, and the step has a forward of its own.
            return (statement.lineno if statement.lineno <= loop_end else 0), False
        if isinstance(statement, ast.Return):
            return 0, True
        for part in held:
            if isinstance(part.ctx, ast.Store):  # losses["kl"] = loss: also losses
                names.add(dotted_text(part.value if isinstance(part, ast.Subscript) else part))
            elif isinstance(part, ast.Attribute) and part.attr == "append":
                names.add(dotted_text(part.value))
        names.discard(None)
    return 0, False


def _runs_wrapper(
    name: str, call: ast.Call, end: int, calls: list[ast.Call], code: SourceFile, frame: Frame, anywhere: bool
) -> bool:
    """Whether the same step, also in another branch if asked, calls the wrapper itself or passes it on."""
    around = dict(_outer_nodes(call, code))
    loop = next((outer for outer in around if isinstance(outer, LOOPS)), None)
    for other in calls:
        if other is call or (other.lineno > end and not anywhere) or _wrapper_of(other.func, frame):
            continue
        runs = dotted_text(other.func) in (name, f"{name}.forward")
        passes = any(dotted_text(given) == name for given in arguments_given(other))
        if not runs and (
            not passes or last_name(other.func) in (*HARMLESS, *AROUND_A_STEP) or _outer_of(other, frame) is not None
        ):
            continue
        theirs = dict(_outer_nodes(other, code))
        if loop is not None and loop not in theirs:
            continue
        branches = [outer for outer in around if isinstance(outer, ast.If | ast.IfExp) and outer in theirs]
        sides = [[_is_else(outer, inner[outer]) for inner in (around, theirs)] for outer in branches]
        if (anywhere or all(mine == other_side for mine, other_side in sides)) and not _is_under(
            other, code, frame, NO_GRAD
        ):
            return True
    return False


def _is_else(outer: ast.If | ast.IfExp, inner: ast.AST) -> bool:
    return inner in outer.orelse if isinstance(outer.orelse, list) else inner is outer.orelse
