from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import ITS_SCALER, holds_back
from ampwise.check.source.accumulation import mentions_accumulation
from ampwise.check.source.apex import dynamically_scaled_losses, scaled_optimizers
from ampwise.check.source.frame import PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, dotted_text, last_name, method_called
from ampwise.check.source.outline import ClassOutline
from ampwise.check.source.questions import guard_source
from ampwise.check.source.statement_order import block_after
from ampwise.check.source.torch_names import OPTIMIZER, SCALER, SCHEDULER
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.walk import events_in
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import BranchGuard, CodeTrace, EventContext, Frame, Loop, SourceEvent, SourceFile
    from ampwise.watch.run_events import SchedulerStep

RULE = Rule(
    code="AMP114",
    name="sched-step-unconditional",
    severity=Severity.INFO,
    summary="A per-iteration scheduler is stepped even when the scaler skipped the optimizer step.",
    why=(
        "`scaler.step(optimizer)` does nothing when it finds inf, which is normal in the first iterations while the "
        "scale is found. A scheduler that is stepped anyway runs ahead of the optimizer: warm-up is shortened by the "
        "number of skipped steps, and torch warns that `lr_scheduler.step()` came before `optimizer.step()`."
    ),
    fix="Step the scheduler only if `scaler.get_scale()` is not smaller after `scaler.update()` than before.",
    bad="scaler.step(optimizer)\nscaler.update()\nscheduler.step()",
    good=(
        "scaler.step(optimizer)\nscale = scaler.get_scale()\nscaler.update()\n"
        "if scaler.get_scale() >= scale:\n    scheduler.step()"
    ),
    fixable="sometimes",
)
NEEDS = (("caler", "MixedPrecision", "Accelerator(", "scale_loss("), ("backward(", "caler("), (".step(",))

# A condition with any of these checks whether the step was applied.
CHECKS_STEP = LazyPattern(
    r"scale|skip|overflow|found_inf|isfinite|isnan|isinf|applied|did_step|stepped|finite|step_count|was_run|fired|success"
)
REPORTS_STEP = LazyPattern(r"get_scale|skip|overflow|found_inf|finite|isnan|isinf|applied|stepped|step_count")
# `if scaler is not None` and `if scaler.is_enabled()` are not about the step, `scaler.get_scale()` is.
SCALER_ITSELF = r"(?i)\w*scaler\b(?!\.)|\w*scaler\.(_enabled|is_enabled)\b"
LOOKS_AT_STEP = LazyPattern(r"get_scale|found_inf|isfinite|isnan|isinf|overflow|skip")
OF_GRADIENTS = LazyPattern(r"grad|norm|overflow|found_inf|scale", re.IGNORECASE)
ONCE_PER_EPOCH = LazyPattern(
    r"==.*\blen\(|\blen\(.*==|last_(batch|iter|step)(?! *[-+<>])|(end|end_of|per|new)_epoch|epoch_end|"
    r"\b(i|j|it|idx|step|iteration|i_?batch|batch_?(idx|i|id|index)?) == \d"
)
LR_FINDER = LazyPattern(r"lr_?find|find_?lr|record_lr|range_test|lr_range", re.IGNORECASE)
# Schedules of something else than the learning rate.
NOT_LR = LazyPattern(
    r"noise|diffus|moment|temp|(^|_)(tau|kl|beta|ema|wd|eps|alpha|gamma|loss|task|mask|aug|weight)_|curricul|"
    r"teacher|dropout|entropy|sampl|prun|spars|sigma|ddpm|ddim",
    re.IGNORECASE,
)
# What a schedule of numbers is made from, rather than from an optimizer.
SETTING = LazyPattern(
    r"(^|[._])(cfg|config|args|hparams|params|opts?)[.]|(steps?|epochs?|iters?|iterations?|len|max|min|start|end|initial|"
    r"final|value|warm_?up|decay|gamma|rate|lr|ratio|length|total|num\w*|n_\w+)$",
    re.IGNORECASE,
)
# A scheduler that takes its position from the optimizer, which counts only applied steps.
FOLLOWS_OPTIMIZER = LazyPattern(r"""\[["']step["']\]|\.state\b|_step_count|found_inf|get_scale""")


def check_source(code: SourceFile) -> Findings:
    for trace in code.traces:
        moves = [
            event
            for event in trace.events()
            if event.kind == "scheduler step" and _counts_iterations(event.node, event.frame, code)
        ]
        found: list[tuple[SourceEvent, SourceEvent | None]] = []  # with the scaler's step that may be skipped
        for move in moves:
            iteration = _iteration(move)
            steps = [step for step in trace.events() if step.kind == "scaler step" and _repeats(move, step, trace)]
            if any(_follows_an_epoch(move, step, trace) for step in steps):
                continue
            if any(step.key == ITS_SCALER for step in steps) and holds_back(move.receiver, code):
                continue
            unguarded = [step for step in steps if not _is_guarded(move, step.context, _backward_of(step, move, trace))]
            if unguarded:
                found.append((move, unguarded[-1]))
            elif not steps and any(not _is_guarded(move, scaled) for scaled in _scaled_for_others(iteration, trace)):
                found.append((move, None))
        for move, step in found:
            edits = _guarded_by_scale(step, [other for other, its in found if its is step], trace) if step else ()
            own = [guard for guard in step.context.guards if guard not in move.context.guards] if step else []
            skips = "this script" if any(LOOKS_AT_STEP.search(guard_source(guard)) for guard in own) else "the scaler"
            yield RULE.at(
                move.place,
                f"the scheduler advances even when {skips} skips the optimizer's step",
                fix=None if edits else RULE.without_edit("step, update and this call do not follow in one block"),
                edits=edits,
                safe=False,
            )
    for call in _beside_apex_step(code):
        yield RULE.at(
            code.script.place(call),
            "the scheduler advances even when apex skips the optimizer's step",
            fix='Step the scheduler only if `amp.state_dict()["loss_scaler0"]["loss_scale"]` has not fallen.',
        )


def _beside_apex_step(code: SourceFile) -> Iterator[ast.Call]:
    """Yield each ``scheduler.step()`` in one block with the step of an optimizer whose loss ``apex.amp`` scales."""
    scaled = {key for call, frame in dynamically_scaled_losses(code) for key in scaled_optimizers(call, frame)}
    parents = code.script.parents
    moves: list[tuple[ast.Call, Frame]] = []
    blocks: set[tuple[ast.AST, str]] = set()  # with such a step: the statement around it, and which of its bodies
    for call in code.nodes(ast.Call) if scaled else ():
        statement = parents[call]
        if method_called(call) != "step" or not isinstance(statement, ast.Expr):
            continue
        frame = code.frame(code.function_at(call))
        assert isinstance(call.func, ast.Attribute)
        if frame.role(call.func.value) == SCHEDULER and _counts_iterations(call, frame, code):
            moves.append((call, frame))
        elif frame.key(call.func.value) in scaled:
            blocks.add(_block_of(statement, parents))
    for call, frame in moves:
        block = _block_of(parents[call], parents)
        while block not in blocks and isinstance(block[0], ast.If) and _asks_for_scheduler(block[0].test, frame):
            block = _block_of(block[0], parents)  # if scheduler is not None: scheduler.step()
        around = block[0]
        asked = frame.outline.script.segment(around.test) if isinstance(around, ast.If) else ""
        if block in blocks and not _checks_step(asked):
            yield call


def _asks_for_scheduler(test: ast.expr, frame: Frame) -> bool:
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
        test = test.left
    return isinstance(test, ast.Name | ast.Attribute) and frame.role(test) == SCHEDULER


def _block_of(statement: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[ast.AST, str]:
    around = parents[statement]
    fields = ("body", "orelse", "finalbody", "handlers")
    return around, next((name for name in fields if statement in getattr(around, name, ())), "")


def _counts_iterations(move: ast.expr, frame: Frame, code: SourceFile) -> bool:
    """Return whether ``scheduler.step()`` is a learning rate's, and counts calls itself."""
    assert isinstance(move, ast.Call)
    assert isinstance(move.func, ast.Attribute)
    # `step(epoch + i / n)` sets a position and `step(loss)` a plateau.
    flags = [word for word in move.keywords if isinstance(word.value, ast.Constant)]  # step(skip_optimizer=True)
    has_arguments = bool(move.args) or len(flags) < len(move.keywords)
    finds_lr = any(LR_FINDER.search(caller.function.name) for caller in frame.callers())
    name = last_name(move.func.value)
    if has_arguments or finds_lr or NOT_LR.search(name) or _is_made_without_optimizer(move.func.value, frame):
        return False
    target = frame.callee(move)
    if target is not None:
        return not FOLLOWS_OPTIMIZER.search(target[0].text)
    # Every scheduler of this name in the file.
    home = code.frame(code.outline.module)
    made = [value for goal, value in code.assignments if isinstance(value, ast.Call) and last_name(goal) == name]
    classes = [found for call in made if isinstance(found := home.definition(call.func), ClassOutline)]
    steps = [method for cls in classes if (method := home.method(cls, "step")) is not None]
    follow = [step for step in steps if FOLLOWS_OPTIMIZER.search(step.text)]
    return not follow or len(follow) < len(made)


def _is_made_without_optimizer(scheduler: ast.expr, frame: Frame) -> bool:
    """Return whether it is an object of a class that gets nothing of which an optimizer may be a part."""
    made = [(value, home) for value, home in frame.values(scheduler) if isinstance(value, ast.Call)]
    if len(made) != 1 or not last_name(made[0][0].func)[:1].isupper():
        return False
    call, home = made[0]
    given = arguments_given(call)
    is_open = any(isinstance(part, ast.Starred) for part in given) or any(word.arg is None for word in call.keywords)
    words = [part.arg or "" for part in call.keywords]
    may_hold = [part for part in given if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)]
    is_number = all(SETTING.search(dotted_text(part) or "") for part in may_hold if home.role(part) != OPTIMIZER)
    of_optimizer = any(home.role(part) == OPTIMIZER or "opt" in ast.unparse(part).lower() for part in given)
    return not (is_open or of_optimizer or "optimizer" in words) and is_number


def _iteration(event: SourceEvent) -> tuple[Loop, ...]:
    """Return the loops around an event, without ``for o in optimizers`` and loops that only move schedulers."""
    loops = event.context.loops
    names = {part.id for part in walk(event.node) if isinstance(part, ast.Name)}
    while loops and isinstance(loops[-1].node, ast.For):
        bound = {part.id for part in walk(loops[-1].node.target) if isinstance(part, ast.Name)}
        of_loop = loops[-1].frame is event.frame and not names.isdisjoint(bound)
        if not of_loop and any(inner.kind != "scheduler step" for inner in events_in(loops[-1].block)):
            break
        loops = loops[:-1]
    return loops


def _repeats(move: SourceEvent, step: SourceEvent, trace: CodeTrace) -> bool:
    """Return whether the scheduler moves in each pass that takes the step, or in each micro-batch before it."""
    mine, its = _iteration(move), _iteration(step)
    if its[:-1] == mine != its and mentions_accumulation(getattr(its[-1].node, "iter", None)):
        its = mine  # a loop over micro-batches, of which one takes the step
    if mine != its:
        backwards = [event.context.loops for event in trace.events() if event.kind == "scaled backward"]
        if mine[: len(its)] != its or mine not in backwards:
            return False
    return _may_meet(move.context, step.context)


def _follows_an_epoch(move: SourceEvent, step: SourceEvent, trace: CodeTrace) -> bool:
    """Return whether the step beside a scheduler's is only that of the batches left over, after a loop over batches.

    The loop steps the same optimizer, and not the scheduler.
    """
    iteration = _iteration(move)
    deeper = [
        event for event in trace.events() if _iteration(event)[: len(iteration)] == iteration != _iteration(event)
    ]
    if any(event.kind == "scheduler step" and event.key == move.key for event in deeper):
        return False
    loops = [_iteration(event)[-1] for event in deeper if event.kind == "scaler step" and event.other == step.other]
    over_batches = [loop for loop in loops if not mentions_accumulation(getattr(loop.node, "iter", None))]
    return _iteration(step) == iteration and bool(over_batches)


def _may_meet(one: EventContext, other: EventContext) -> bool:
    decided = {guard.text: guard.holds for guard in one.guards}
    return all(decided.get(guard.text, guard.holds) == guard.holds for guard in other.guards)


def _scaled_for_others(iteration: tuple[Loop, ...], trace: CodeTrace) -> list[EventContext]:
    """Return where ``scaler.scale(loss)`` is called in an iteration without any step: code we cannot see takes it."""
    if any(event.kind in ("scaler step", "optimizer step", "opaque") for event in trace.events()):
        return []
    sites = [site for site in trace.calls if method_called(site.node) == "scale" and site.context.loops == iteration]
    scaled = [site for site in sites if site.context.frame.role(site.call.func.value) == SCALER]  # type: ignore[attr-defined]
    return [site.context for site in scaled if iteration]


def _backward_of(step: SourceEvent, move: SourceEvent, trace: CodeTrace) -> SourceEvent | None:
    """Return the backward whose gradients a step applies, if both come before the scheduler in one function."""
    if step.frame is not move.frame or move.line < step.line:
        return None
    earlier = [event for event in trace.events() if event.kind == "scaled backward" and event.frame is step.frame]
    return next((event for event in reversed(earlier) if event.key == step.key and event.line < step.line), None)


def _is_guarded(move: SourceEvent, step: EventContext, backward: SourceEvent | None = None) -> bool:
    """Return whether a condition of the scheduler's step asks if the scaler's step was applied, or is rarely true."""
    for guard in move.context.guards:
        if guard in step.guards:
            home = guard.frame.function if guard.frame is not None else None
            if backward is not None and home is backward.frame.function and guard.test.lineno < backward.line:  # type: ignore[union-attr]
                continue  # it asks before there are gradients: of those of another optimizer
            # Both are under it: with a finite norm the scaler does not skip, with a finite loss it may.
            if OF_GRADIENTS.search(re.sub(SCALER_ITSELF, "", guard_source(guard))) and _asks(guard, move, step):
                return True
            continue
        is_rare = guard.holds and ONCE_PER_EPOCH.search(guard_source(guard))  # but not `if not self.once_per_epoch:`
        if guard.boundary is not None or is_rare or _asks(guard, move, step):
            return True
    return False


def _asks(guard: BranchGuard, move: SourceEvent, step: EventContext) -> bool:
    """Return whether it tests the step, its result, ``ok = torch.isfinite(norm)``, or what a call with it returns."""
    names = [part for part in walk(guard.test) if isinstance(part, ast.Name)] if guard.test is not None else []
    blind = [part.id for part in names if guard.frame is not None and _is_set_blindly(part, guard.frame, step)]
    if _checks_step(re.sub(rf"\b({'|'.join(blind)})\b", "", guard_source(guard)) if blind else guard_source(guard)):
        return True
    if blind and isinstance(guard.test, ast.Name):
        return False
    for frame in move.frame.callers():
        for value in [PossibleValue(guard.test, frame), *frame.values(guard.test)] if guard.test is not None else ():
            if isinstance(value.node, ast.Compare) and _checks_step(ast.unparse(value.node)):
                return True  # applied = scaler.get_scale() >= before
            if isinstance(value.node, ast.Call):
                called = (dotted_text(value.node.func) or "").rpartition(".")[2]
                target = value.frame.callee(value.node)
                reports = target is not None and REPORTS_STEP.search(target[0].text)
                if called == "step" or reports or _checks_step(ast.unparse(value.node)):
                    return True
    return False


def _is_set_blindly(name: ast.Name, frame: Frame, step: EventContext) -> bool:
    """Whether it is a flag that the function with the scaler's step sets to True after it, applied or not."""
    stepping = step.frame.function
    if LOOKS_AT_STEP.search(stepping.text):
        return False
    values: list[ast.expr | None] = []
    for binding in frame.function.bindings.get(name.id, ()):
        call = getattr(binding.node, "value", None)
        target = frame.callee(call) if isinstance(call, ast.Call) else None
        if target is None or target[0] is not stepping:
            values.append(binding.value)
            continue
        for returned in stepping.returns:  # loss, stepped = self.train_step(batch)
            goal = binding.node.targets[0] if isinstance(binding.node, ast.Assign) else None
            if isinstance(goal, ast.Tuple) and isinstance(returned, ast.Tuple) and len(goal.elts) == len(returned.elts):
                pairs = zip(goal.elts, returned.elts, strict=True)
                returned = next((value for part, value in pairs if dotted_text(part) == name.id), None)
            if isinstance(returned, ast.Name):
                values += [one.value for one in stepping.bindings.get(returned.id, ())]
            else:
                values.append(returned)
    return bool(values) and all(isinstance(value, ast.Constant) and isinstance(value.value, bool) for value in values)


def _checks_step(asked: str) -> bool:
    return bool(CHECKS_STEP.search(re.sub(SCALER_ITSELF, "", asked)))


def _guarded_by_scale(step: SourceEvent, moves: list[SourceEvent], trace: CodeTrace) -> tuple[Edit, ...]:
    """Return edits that keep the scale from before ``update()`` and step the schedulers only if it has not fallen.

    None unless the step, the update and then the schedulers follow each other in one block.
    """
    scaler = dotted_text(step.receiver)
    updates = [event for event in trace.events() if event.kind == "update" and event.frame is step.frame]
    if len(updates) != 1 or scaler is None or any(move.frame is not step.frame for move in moves):
        return ()
    update = updates[0]
    script = step.frame.outline.script
    following = block_after(step, script)
    position = next((index for index, one in enumerate(following) if getattr(one, "value", None) is update.node), None)
    if position is None:
        return ()
    inside = {part for statement in following[position + 1 :] for part in walk(statement)}
    statements = [script.statement(move.node) for move in moves]
    if not all(
        isinstance(one, ast.Expr) and one.value is move.node for one, move in zip(statements, moves, strict=True)
    ):
        return ()
    starts_line = all(not script.lines[one.lineno - 1][: one.col_offset].strip() for one in statements)
    if not starts_line or not inside.issuperset(statements):
        return ()
    used = set(re.findall(r"\bscale_\w+", script.text))
    name = next((name for name in ("scale_before", "scale_before_update") if name not in used), None)
    if name is None:
        return ()
    edits = [script.insert_before(update.node, f"{name} = {scaler}.get_scale()")]
    for one in dict.fromkeys(statements):
        margin = script.lines[one.lineno - 1][: one.col_offset]
        unit = "\t" if "\t" in margin else "    "
        text = script.segment(one).replace("\n", f"\n{unit}")
        edits.append(script.replace(one, f"if {scaler}.get_scale() >= {name}:\n{margin}{unit}{text}"))
    return tuple(edits)


def check_event(move: SchedulerStep) -> Findings:
    if move.after_skip and move.per_step:
        warned = "; torch warns of it" if move.before_any_update else ""
        yield RULE.at(move.site.place, f"`{move.scheduler}` advances after steps that the scaler skipped{warned}")
