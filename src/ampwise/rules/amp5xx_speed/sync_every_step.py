from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.cases import guards_around
from ampwise.check.source.events import EventKind
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import code_of, dotted_text, last_name, method_called
from ampwise.check.source.questions import guard_source
from ampwise.check.source.relevance import IN_HALF, has_any
from ampwise.check.source.torch_names import SCALER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.events import BranchGuard
    from ampwise.check.source.frame import Frame
    from ampwise.check.source.project import SourceFile
    from ampwise.check.source.steps import Region
    from ampwise.check.source.walk import CodeSite
    from ampwise.watch.time_use import TimeUse

RULE = Rule(
    code="AMP502",
    name="sync-every-step",
    severity=Severity.INFO,
    summary="Every training step syncs with the GPU once per parameter, or to log the loss scale.",
    why=(
        "`.item()`, `.cpu()` and `float(tensor)` block until the GPU has finished all queued work. Once per "
        "parameter, that is hundreds of syncs per step, between which the GPU is idle. `scaler.get_scale()` syncs too."
    ),
    fix="Reduce on the GPU, as `torch.nn.utils.get_total_norm` does, and sync once; log only every few steps.",
    bad=(
        "for x, y in loader:\n    train_step(x, y)\n"
        "    norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5"
    ),
    good=(
        "for x, y in loader:\n    train_step(x, y)\n    grads = [p.grad for p in model.parameters()]\n"
        "    norm = torch.nn.utils.get_total_norm(grads)"
    ),
)
NEEDS = (
    (".backward(", "caler("),
    ("get_scale", ".item(", ".cpu(", "float(", "isnan", "isinf", "isfinite", "caler.state_dict("),
)

OVER_PARAMETERS = LazyPattern(r"\b(named_)?parameters\(")
# Of tensors, or a dictionary of settings.
OVER_LIST = LazyPattern(r"(\b|_)(param(eter)?s|param_list|params_list|grads|gradients)\b")
OF_A_TENSOR = frozenset(("grad", "data", "norm", "abs", "mean", "std", "var", "sum", "max", "min"))
A_STEP = LazyPattern(r"step|iter|batch|optimi[sz]e|update|train")  # a function that is called once per step
# Guards that distinguish parameters rather than steps.
ABOUT_PARAMETERS = LazyPattern(r"grad|\bp\b|param|dim\b|weight|bias")
ASKS_FOR_NAN = LazyPattern(r"^[\w.]*is(nan|inf|finite)\([\w.]+\)$")  # almost every step has none
# An option, off in most runs.
LOOKS_CLOSER = LazyPattern(
    r"^[\w.]*((print|debug|detect|verbose|inspect)\w*|(\b|_)(log|track|monitor|record|plot)_\w+)$"
)
# The same in every step: which process this is, whether there is a logger.
FOR_THE_WHOLE_RUN = LazyPattern(r"\b(ddp|distributed|master|main_process|rank)\b|(run|logger|writer) is not None$")
LOGS = LazyPattern(r"^(log|log_\w+|add_scalars?|print|info|debug|set_postfix|set_postfix_str|set_description|write)$")
READS_SCALE = ("get_scale", "caler.state_dict(")
LOGGER = LazyPattern(r"log|metric|meter|writer|tracker|wandb", re.IGNORECASE)  # whose update() logs
ASKS_EACH = frozenset(("float", "isnan", "isinf", "isfinite"))
ASKS_ITSELF = ASKS_EACH - {"float"}  # as methods: p.grad.isfinite().all()
EXITS = LazyPattern(r"^(_?exit|quit|abort|breakpoint|set_trace)$")
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
STEP = ("backward", "scaled backward", "scaler step", "optimizer step")
KNOWN_WITHOUT_SYNC = frozenset(("numel", "shape", "size", "dim", "ndim", "nelement"))
FOR_EACH = "syncs with the GPU once per parameter, in every step"
FOR_THE_LOG = "syncs with the GPU in every step, only to log the loss scale"
# Logging a loss, moving a batch and a scaler's check for inf are a sync or two each.
MANY = 4


def check_source(code: SourceFile) -> Findings:
    reads_scale = has_any(code.script.text, READS_SCALE)
    if not reads_scale and "param" not in code.script.text:
        return
    seen: set[ast.AST] = set()
    for region in code.regions:
        if not region.has(*STEP[:2]) or not region.has(*STEP[2:]):
            continue
        start = region.trace.frame.function
        if not has_any(start.outline.script.text, IN_HALF) or not (region.loop or A_STEP.search(start.name)):
            continue  # training in FP32 alone, or a single step
        for node, whole, message in _syncs_in(region, code, reads_scale=reads_scale):
            if whole not in seen and not _ends_training(whole, code):
                seen.add(whole)
                yield RULE.at(code.script.place(node), message)


def _syncs_in(region: Region, code: SourceFile, *, reads_scale: bool) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yield what syncs in every step of a region, with what it is reported for once, and the message."""
    steps = [event for event in region.events if event.kind in STEP]
    asked = {guard for event in steps for guard in event.context.guards}
    frames = {frame for event in steps for frame in event.frame.callers()}
    for event in steps:
        for guard in region.own_guards(event):  # the tests that each step is under
            if event.frame.outline is not code.outline or LOOKS_CLOSER.search(guard_source(guard)):
                break
            for node in _comprehensions_that_sync(guard.test, event.frame) if guard.test is not None else ():
                yield node, node, FOR_EACH
    for site in region.trace.statements_in(region.loop):
        context = site.context
        inside = region.loop is not None or not frames.isdisjoint(context.frame.callers())
        if inside and context.frame.outline is code.outline:
            guards = [guard for guard in context.guards if guard not in asked]  # beyond those of the step itself
            yield from _for_each_parameter(site, region, guards)
            yield from _logged_scale(site, guards) if reads_scale else ()
    for node in _in_own_clips(region, code, asked):
        yield node, node, FOR_EACH


def _for_each_parameter(
    site: CodeSite, region: Region, guards: list[BranchGuard]
) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yield each expression that syncs and its loop: a loop is reported once."""
    if not _is_in_every_step(guards):
        return
    loops = site.context.loops
    further = loops[loops.index(region.loop) + 1 :] if region.loop in loops else loops
    if not further:
        for node in _comprehensions_that_sync(site.node, site.context.frame):
            yield node, node, FOR_EACH
        return
    loop, outer = further[-1].node, further[:-1]
    in_groups = all(isinstance(one.node, ast.For) and "param_groups" in code_of(one.node.iter) for one in outer)
    if not in_groups or not isinstance(loop, ast.For):
        return
    if _reads_each_parameter(site.node, loop):
        yield site.node, loop, FOR_EACH
    for guard in guards:
        if guard.test is not None and _reads_each_parameter(guard.test, loop, is_test=True):
            yield guard.test, loop, FOR_EACH


def _is_in_every_step(guards: list[BranchGuard]) -> bool:
    """Whether guards distinguish parameters, or runs, but not steps."""
    for guard in guards:
        source = guard_source(guard)
        is_healthy = ASKS_FOR_NAN.match(source) and guard.holds is ("isfinite" in source)
        either = is_healthy or ABOUT_PARAMETERS.search(source) or FOR_THE_WHOLE_RUN.search(source)
        if guard.boundary is not None or not either or "%" in guard.text or LOOKS_CLOSER.search(source):
            return False
    return True


def _in_own_clips(region: Region, code: SourceFile, asked: set[BranchGuard]) -> Iterator[ast.AST]:
    """Yield what syncs for each parameter in a script's own ``clip_grad_norm``, which has the name of torch's."""
    for event in region.events_of(EventKind.CLIP):
        target = event.frame.callee(event.node) if isinstance(event.node, ast.Call) else None
        is_own = target is not None and target[0].outline is code.outline
        if (
            target is None
            or not is_own
            or not _is_in_every_step([one for one in event.context.guards if one not in asked])
        ):
            continue
        function = target[0]
        yield from _comprehensions_that_sync(function.node, code.frame(function))
        for loop in [part for part in walk(function.node) if isinstance(part, ast.For)]:
            for statement in [part for part in walk(loop) if isinstance(part, ast.Expr | ast.Assign | ast.AugAssign)]:
                tests = [guard.test for guard in guards_around(statement, function)]
                asks = [test if isinstance(test, str) else code_of(test) for test in tests]
                if _reads_each_parameter(statement, loop) and all(map(ABOUT_PARAMETERS.search, asks)):
                    yield statement
                    break


def _comprehensions_that_sync(root: ast.AST, frame: Frame) -> Iterator[ast.AST]:
    """Yield ``[p.grad.norm().item() for p in params]`` and ``any(torch.isnan(p.grad).any() for p in params)``."""
    for node in walk(root):
        if isinstance(node, COMPREHENSIONS):
            inside = node.value if isinstance(node, ast.DictComp) else node.elt
            user = frame.outline.script.parents.get(node)
            is_test = isinstance(user, ast.Call) and last_name(user.func) in ("any", "all")
            if isinstance(user, ast.Call) and dotted_text(user.func) in ("max", "min") and _is_tensor(inside):
                inside = ast.Call(ast.Name("float"), [inside], [])  # it compares them, one after the other
            if _reads_each_parameter(inside, node.generators[0], is_test):
                yield node


def _is_tensor(node: ast.expr) -> bool:
    """Whether it is the result of a method of a tensor: ``p.grad.abs().max()``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_A_TENSOR


def _ends_training(node: ast.AST, code: SourceFile) -> bool:
    """Whether a block around a node ends in an exception or an exit: it looks for a cause, once."""
    parents = code.script.parents
    above = parents.get(node)
    while above is not None and not isinstance(above, ast.For | ast.While):
        last = above.body[-1] if isinstance(above, ast.If) else None
        above = parents.get(above)
        ended = last.value if isinstance(last, ast.Expr) else None
        if isinstance(last, ast.Raise) or (isinstance(ended, ast.Call) and EXITS.match(last_name(ended.func))):
            return True
    return False


def _reads_each_parameter(node: ast.AST, loop: ast.For | ast.comprehension, is_test: bool = False) -> bool:
    """Return whether a value of each parameter, or of its gradient, is copied from the GPU, also to test its truth."""
    over = code_of(loop.iter)
    certain = OVER_PARAMETERS.search(over) is not None
    if not certain and not OVER_LIST.search(over):
        return False
    names = {part.id for part in walk(loop.target) if isinstance(part, ast.Name)}
    made: set[str] = set()  # norm = p.grad.norm(2), then norm.item()
    for name, value in _tensors_made_in(loop) if isinstance(loop, ast.For) else ():
        if any(isinstance(part, ast.Name) and part.id in names | made for part in walk(value)):
            made.add(name)
    for call in walk(node):
        if not isinstance(call, ast.Call):
            continue
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr in ("item", "cpu", "tolist") and not call.args:
            parts = list(walk(func.value))
        elif call.args and (last_name(func) in ASKS_EACH if is_test else dotted_text(func) == "float"):
            parts = list(walk(call.args[0]))
        elif is_test and isinstance(func, ast.Attribute) and func.attr in ASKS_ITSELF:
            parts = list(walk(func.value))
        else:
            continue
        used = {part.id for part in parts if isinstance(part, ast.Name)}
        attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
        is_tensor = certain or not attributes.isdisjoint(OF_A_TENSOR) or not used.isdisjoint(made)
        if not used.isdisjoint(names | made) and attributes.isdisjoint(KNOWN_WITHOUT_SYNC) and is_tensor:
            return True
    return False


@functools.lru_cache(maxsize=32)  # called for every statement of a loop
def _tensors_made_in(loop: ast.For) -> list[tuple[str, ast.expr]]:
    """Return the names that a loop assigns, in order, with their values, as far as they may be tensors on the GPU."""
    found = []
    for node in walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            attributes = {part.attr for part in walk(node.value) if isinstance(part, ast.Attribute)}
            if attributes.isdisjoint(KNOWN_WITHOUT_SYNC | {"item", "cpu", "tolist"}) and attributes & OF_A_TENSOR:
                found.append((node.targets[0].id, node.value))
    return found


def _logged_scale(site: CodeSite, guards: list[BranchGuard]) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yield ``scaler.get_scale()`` in the arguments of a logging call, or in the value of a name for the log alone."""
    statement, frame = site.node, site.context.frame
    reads = [part for part in walk(statement) if isinstance(part, ast.Call) and _reads_scale(part, frame)]
    if not reads or not all(FOR_THE_WHOLE_RUN.search(guard_source(one)) and "%" not in one.text for one in guards):
        return
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        logging = _uses_in_logs(statement.targets[0].id, frame)
    else:
        logging = [statement] if _logs(statement) else []
    nodes = [node for each in (statement, *logging) for node in walk(each)]
    if not logging or any(isinstance(node, ast.Call) and method_called(node) == "item" for node in nodes):
        return  # the loss beside it has synced already
    # In a test, or as a divisor of gradients, the scale is not what is logged.
    computed = [node for node in nodes if isinstance(node, ast.Compare | ast.IfExp | ast.BinOp)]
    names = {dotted_text(statement.targets[0])} if isinstance(statement, ast.Assign) else set()
    inside = [inner for node in computed for inner in walk(node)]
    if names.isdisjoint({dotted_text(inner) for inner in inside} - {None}):
        yield from ((read, read, FOR_THE_LOG) for read in reads if read not in inside)


def _logs(statement: ast.AST) -> bool:
    """Whether a statement is a call that only logs: ``writer.add_scalar(...)``, ``metric_logger.update(...)``."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    func = statement.value.func
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    updates = name == "update" and isinstance(func, ast.Attribute) and LOGGER.search(last_name(func.value))
    return bool(LOGS.match(name) or updates)


def _uses_in_logs(name: str, frame: Frame) -> list[ast.AST]:
    """Return the statements that log a name; none if it has any other use."""
    script = frame.outline.script
    uses = [part for part in walk(frame.function.node) if isinstance(part, ast.Name) and part.id == name]
    statements = [script.statement(use) for use in uses if isinstance(use.ctx, ast.Load)]
    return [*statements] if all(_logs(each) for each in statements) else []


def _reads_scale(call: ast.Call, frame: Frame) -> bool:
    """Whether a call copies the scale from the GPU: ``scaler.get_scale()``, ``scaler.state_dict()["scale"]``."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr not in ("get_scale", "state_dict"):
        return False
    above = frame.outline.script.parents.get(call)
    key: ast.AST | None = above.slice if isinstance(above, ast.Subscript) else None
    user = frame.outline.script.parents.get(above) if isinstance(above, ast.Attribute) and above.attr == "get" else None
    if isinstance(user, ast.Call) and user.args:
        key = user.args[0]
    is_asked = func.attr == "get_scale" or (isinstance(key, ast.Constant) and key.value == "scale")
    return is_asked and frame.role(func.value) == SCALER


def check_time(use: TimeUse) -> Findings:
    for site, count in use.syncs.items():
        each = count / use.sync_steps if use.sync_steps else 0.0
        if each >= MANY:
            evidence = {"waits": count, "steps": use.sync_steps}
            yield RULE.at(site.place, f"syncs with the GPU {each:.0f} times per step", evidence=evidence)
