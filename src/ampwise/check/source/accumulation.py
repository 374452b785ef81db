"""Gradient accumulation: windows of micro-batches that share one optimizer step.

A window ends with a step under a test for its last micro-batch (``(i + 1) % n == 0``, a counter that is reset there,
``micro_step == n - 1``, a flag such as ``is_last_accum_step``), or it is an inner loop of backwards with the step after
it. Each window has its own optimizers: a GAN may accumulate for the generator and step the critic every time.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.accelerators import ITS_SCALER
from ampwise.check.source.events import BranchGuard, EventKind, Loop, SourceEvent
from ampwise.check.source.execution_paths import ExecutionPath
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, code_of, dotted_text, last_name, method_called
from ampwise.check.source.steps import BACKWARDS, STEPS, Region
from ampwise.check.source.tree_walk import walk

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile

ACCUMULATES = LazyPattern(
    r"accum|micro|grad_?acc|virtual_?b|sub_?batch|batch_?(split|mul)|subdivision|iter_size|update_freq"
    r"|(?<![a-z])accu?_?(steps?|iters?|num|grads?)(?![a-z])",
    re.IGNORECASE,
)
# A flag with such a name says that a micro-batch is the last, or is not; `accumulation_steps` says how many there are.
FLAG = LazyPattern(
    r"(^|_)(is|do|should|last|final|end|finish\w*|done|ready|boundary|complete|full|accumulat(e|ing)|sync|needs?)(_|$)",
    re.IGNORECASE,
)
COUNTER = LazyPattern(r"^(i|j|k|idx|it|step|batch)$|_(i|idx|id|index|step|iter|it|count|counter|num|no)$|count|^micro")
PIECES = frozenset(("chunk", "split", "tensor_split"))  # a loop over these goes through the parts of one batch
FETCHES = frozenset(("next", "get_batch", "next_batch", "get_next_batch", "sample_batch"))


class AccumulationWindow:
    """Micro-batches that share one step."""

    def __init__(
        self,
        region: Region,
        size: ast.expr | None,
        loop: Loop | None,
        paths: list[ExecutionPath],
        backwards: list[SourceEvent],
        steps: list[SourceEvent],
    ) -> None:
        self.region = region
        self.size = size  # number of micro-batches, if an expression gives it
        self.loop = loop  # the inner loop over them; None: the region's own loop, with a test for the last
        self.paths = paths  # paths through a micro-batch that is not the last
        self.backwards = backwards  # of its micro-batches
        self.steps = steps  # at its end
        self.optimizers = {optimizer_of(step) for step in steps}
        self._usual_guards = {guard for backward in backwards for guard in backward.context.guards}

    def events_on(self, path: ExecutionPath, *kinds: str) -> list[SourceEvent]:
        """Return the events of these kinds that every micro-batch on a path has."""
        events = [event for event in path.events if event.kind in kinds]
        return events if self.loop is None else [event for event in events if self.loop in event.context.loops]

    def concerns(self, event: SourceEvent) -> bool:
        """Whether an event may concern these gradients: it is not that of another optimizer, or of its scaler."""
        if event.kind == EventKind.UPDATE:
            scalers = {backward.key for backward in self.backwards if backward.key is not None}
            return not scalers or event.key is None or event.key in scalers
        others = {optimizer_of(step) for step in self.region.events_of(*STEPS)} - self.optimizers
        return (event.other if event.kind == EventKind.UNSCALE else event.key) not in others - {None}

    def only_sometimes(self, event: SourceEvent) -> bool:
        """Whether ``event`` has conditions that the backward has not, other than constant flags."""
        return any(not self._is_flag(guard) for guard in self.further_guards(event))

    def steady(self, events: list[SourceEvent]) -> list[SourceEvent]:
        """Return the events that every micro-batch has, or none of a run: only constant flags guard them."""
        return [event for event in events if all(map(self._is_flag, self.region.own_guards(event)))]

    def further_guards(self, event: SourceEvent) -> list[BranchGuard]:
        """Return the guards of ``event`` that no backward has."""
        return [guard for guard in self.region.own_guards(event) if guard not in self._usual_guards]

    def _is_flag(self, guard: BranchGuard) -> bool:
        """Whether a test is the same for every micro-batch: nothing in the loop assigns its names."""
        loop = self.loop or self.region.loop
        if guard.test is None or guard.boundary is not None or loop is None:
            return False
        if any(isinstance(part, ast.Call | ast.BinOp) for part in walk(guard.test)):
            return False
        if mentions_accumulation(guard.test) or (self.size and code_of(self.size) in code_of(guard.test)):
            return False  # `if accumulation == 1:` tests whether there are micro-batches at all
        names = {dotted_text(part) for part in walk(guard.test) if isinstance(part, ast.Name | ast.Attribute)}
        return names.isdisjoint(_assigned_in(loop.node))


def accumulation_windows(region: Region) -> list[AccumulationWindow]:
    """Return the accumulation windows of a training step; none if part of the step is in code we cannot see."""
    if region.hidden or not region.has(*BACKWARDS) or not region.has(*STEPS):
        return []
    if any(event.key == ITS_SCALER for event in region.events):
        return []  # the accelerator divides the loss, and its optimizers pass over the other micro-batches
    return [*_tested(region), *_looped(region)]


def events_of_each_micro_batch(
    code: SourceFile, kind: str, applies: Callable[[SourceEvent, AccumulationWindow], bool]
) -> Iterator[SourceEvent]:
    """Yield the events of a kind that happen on every micro-batch, once, if ``applies`` holds in one of the windows."""
    for region in code.regions:
        if not region.has(kind):
            continue
        found: set[SourceEvent] = set()
        for window in accumulation_windows(region):
            for event in dict.fromkeys(event for path in window.paths for event in window.events_on(path, kind)):
                if event not in found and window.concerns(event) and applies(event, window):
                    found.add(event)
                    yield event


def cleared_before_the_last(window: AccumulationWindow) -> list[SourceEvent]:
    """Return what clears the gradients in the last micro-batch, before its backward: the step applies that one alone.

    It is under the test of the step itself: ``i % n == 0`` there, but not for a step where ``(i + 1) % n == 0``.
    """
    loop = window.region.loop
    if window.loop is not None or loop is None:
        return []
    changed = {name for statement in loop.node.body for name in _assigned_in(statement)}
    tests = {code for step in window.steps for code in _tests_for_the_last(step, changed)}
    found: dict[SourceEvent, None] = {}
    for path in window.region.paths if tests else ():
        cleared: dict[SourceEvent, bool] = {}  # and whether a backward came since
        for event in path.events:
            if event.kind == EventKind.ZERO_GRAD and not tests.isdisjoint(_tests_for_the_last(event, changed)):
                cleared[event] = False
            elif event in window.steps:
                applied = [clear for clear, computed in cleared.items() if computed]
                whole = len(window.optimizers) == 1
                found.update({clear: None for clear in applied if clear.key == optimizer_of(event) or whole})
                cleared = {}
            elif event in window.backwards and tests.isdisjoint(_tests_for_the_last(event, changed)):
                cleared = dict.fromkeys(cleared, True)
    return [event for event in found if window.concerns(event)]


def _tests_for_the_last(event: SourceEvent, changed: set[str | None]) -> set[str]:
    """Return the tests for the last micro-batch around an event whose names nothing in the loop changes."""
    tests = [guard.test for guard in event.context.guards if guard.boundary is not None and guard.holds]
    return {
        code_of(test)
        for test in tests
        if test is not None
        and changed.isdisjoint(dotted_text(part) for part in walk(test) if isinstance(part, ast.Name | ast.Attribute))
    }


def optimizer_of(step: SourceEvent) -> str | None:
    """Return the key of the optimizer that a step applies."""
    return step.other if step.kind == EventKind.SCALER_STEP else step.key


def mentions_accumulation(node: ast.AST | None) -> bool:
    """Whether the source of a node mentions accumulation or micro-batches."""
    return node is not None and bool(ACCUMULATES.search(code_of(node)))


def names_one_optimizer(event: SourceEvent) -> bool:
    """Whether the first argument always names the same optimizer; in ``for opt in optimizers`` it changes."""
    node = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    home = event.frame.function.home_of(node.id)
    bindings = home.bindings.get(node.id, []) if home is not None else []
    return len(bindings) <= 1 and not any(isinstance(binding.node, ast.For | ast.AsyncFor) for binding in bindings)


# -- windows that end with a step under a test ---------------------------------------------------------------


def _tested(region: Region) -> Iterator[AccumulationWindow]:
    """Yield the windows that end with a step under a test for the last micro-batch."""
    tests: dict[str, tuple[BranchGuard, ast.expr | None, tuple[BranchGuard, ...]]] = {}
    steps: dict[str, list[SourceEvent]] = {}
    inner = _loops_with_a_step(region)
    for event in region.events_of(*STEPS):
        if not inner.isdisjoint(event.context.loops):
            continue  # it belongs to the region of that loop; this region to a step after it
        guards = region.own_guards(event)
        for index, guard in enumerate(guards):
            if guard.text not in tests:
                is_last, size = _last_micro_batch(guard, region, event)
                is_own = isinstance(size, ast.Name) and size.id in event.frame.function.params  # others may give more
                values = event.frame.values(size) if is_last and size is not None and not is_own else []
                one = values and all(value.node is not None and _is_literal(value.node, 1) for value in values)
                if not is_last or one:
                    continue
                tests[guard.text] = guard, size, guards[:index]
            steps.setdefault(guard.text, []).append(event)
    for text, (guard, size, around) in tests.items():
        backwards = _applied_by(steps[text], region, guard)
        taken = set(steps[text])
        paths = [path for path in region.paths if _is_between(path, guard, around, backwards, taken, region)]
        if paths:
            yield AccumulationWindow(region, size, None, paths, list(backwards), steps[text])


def _loops_with_a_step(region: Region) -> set[Loop]:
    """Return the inner loops with both a backward and a step: they are regions of their own."""
    computing = {loop for event in region.events_of(*BACKWARDS) for loop in region.inner_loops(event)}
    return computing & {loop for event in region.events_of(*STEPS) for loop in event.context.loops}


def _applied_by(steps: list[SourceEvent], region: Region, last_batch: BranchGuard) -> dict[SourceEvent, None]:
    """Return the backwards whose gradients these steps apply: those before them, after the step of another optimizer.

    If a step comes first in its loop, it applies what the previous iterations left: all backwards. The other micro-
    batches may have a backward of their own, under ``model.no_sync()``.
    """
    optimizers = {optimizer_of(step) for step in steps}
    is_only = all(optimizer_of(step) in optimizers for step in region.events_of(*STEPS))
    last = set(steps)
    found: dict[SourceEvent, None] = {}
    for path in region.paths:
        waiting: list[SourceEvent] = []  # backwards that nothing has applied yet
        for event in path.events:
            if event.kind in BACKWARDS:
                waiting.append(event)
            elif event in last:
                found.update(dict.fromkeys(waiting))
            elif event.kind in STEPS or event.kind == EventKind.ZERO_GRAD:
                waiting = []  # a step beside these, or another optimizer's, has applied them
        if is_only and path.decided.get(last_batch.text) is (not last_batch.holds):
            found.update(dict.fromkeys(waiting))
    if not found and is_only:
        found = dict.fromkeys(region.events_of(*BACKWARDS))
    inner = _loops_with_a_step(region)
    return {event: None for event in found if inner.isdisjoint(event.context.loops)}


def _is_between(
    path: ExecutionPath,
    last: BranchGuard,
    around: tuple[BranchGuard, ...],
    backwards: dict[SourceEvent, None],
    steps: set[SourceEvent],
    region: Region,
) -> bool:
    """Whether a path through a micro-batch computes gradients of a window without its step."""
    decided = path.decided.get(last.text)
    if decided is last.holds or path.ended == "break":
        return False
    if path.ended == "return" and (region.loop is not None or decided is None):
        return False  # training ends, or the function is left before the test
    if any(path.decided.get(guard.text) is not guard.holds for guard in around):
        return False  # another mode, which may not accumulate
    optimizers = {optimizer_of(step) for step in steps}
    taken = [event for event in path.events if event.kind in STEPS]
    if any(event in steps or optimizer_of(event) in optimizers for event in taken):
        return False
    return any(event in backwards for event in path.events)


def _last_micro_batch(guard: BranchGuard, region: Region, step: SourceEvent) -> tuple[bool, ast.expr | None]:
    """Return whether a test holds at the last micro-batch only, and the number of micro-batches if it shows."""
    test = guard.test
    if guard.boundary is not None:
        parts = [part for part in walk(test) if isinstance(part, ast.BinOp)] if test and guard.holds else []
        size = next((part.right for part in parts if isinstance(part.op, ast.Mod)), None)
        return size is not None, size
    if isinstance(test, ast.Name | ast.Attribute | ast.Call):
        name = last_name(test.func if isinstance(test, ast.Call) else test)
        return bool(ACCUMULATES.search(name) and FLAG.search(name)), None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False, None
    if not isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.GtE | ast.Gt | ast.Lt | ast.LtE):
        return False, None
    counter, size = test.left, test.comparators[0]
    if isinstance(size, ast.Constant) and not isinstance(size.value, int):
        return False, None
    for side in (counter, size):  # `seen + 1 == n`, `seen == n - 1`
        if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add | ast.Sub) and _is_literal(side.right, 1):
            counter, size = (side.left, size) if side is counter else (counter, side.left)
    # The step comes when the count is reached, not as long as it is below, as in `if failures < patience:`.
    reached = guard.holds is not isinstance(test.ops[0], ast.Lt | ast.LtE)
    if reached is _is_literal(size, 0):  # for a count down to zero, `left == 0` is `not some(left)`
        return False, None
    counted = dotted_text(counter)
    if isinstance(counter, ast.Subscript) and isinstance(counter.slice, ast.Constant):  # state["micro_step"]
        counted = str(counter.slice.value)
    counters = _counters(region.loop.node if region.loop is not None else step.frame.function.node)
    if counted is None or counted in counters:
        return counted is not None, size if counters.get(counted) else None
    # `micro_step == accumulation - 1`, but not `accumulation > 1` or `epoch >= accumulate_from`.
    counts = not isinstance(size, ast.Constant) and COUNTER.search(counted.rpartition(".")[2])
    return bool(counts) and mentions_accumulation(size), size


@functools.lru_cache(maxsize=16)
def _counters(scope: ast.AST) -> dict[str | None, bool]:
    """Return the names that a loop or function counts with, and whether they count micro-batches from zero.

    It adds to them and resets them to zero, or it counts down and sets them again.
    """
    adds_one: dict[str | None, bool] = {}
    counts_down: set[str | None] = set()
    assigned: set[str | None] = set()
    reset: set[str | None] = set()
    for node in walk(scope):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            adds_one[dotted_text(node.target)] = _is_literal(node.value, 1)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub) and _is_literal(node.value, 1):
            counts_down.add(dotted_text(node.target))
        elif isinstance(node, ast.Assign):
            names = [dotted_text(target) for target in node.targets]
            assigned.update(names)
            reset.update(names if _is_literal(node.value, 0) else ())
    found = {name: one for name, one in adds_one.items() if name in reset}
    return found | dict.fromkeys(counts_down & assigned, False)


# -- windows that are an inner loop --------------------------------------------------------------------------


def _looped(region: Region) -> Iterator[AccumulationWindow]:
    """Yield the windows that are a loop of backwards, with the step after it."""
    loops = dict.fromkeys([loop for event in region.events_of(*BACKWARDS) for loop in region.inner_loops(event)])
    steps = region.events_of(*STEPS)
    stepping = {loop for event in steps for loop in event.context.loops}
    for loop in loops:
        if loop in stepping or not (_goes_through_micro_batches(loop.node) or _goes_through_pieces(loop)):
            continue
        size = _rounds(loop.node)
        paths = [path for path in region.paths if any(loop in event.context.loops for event in path.events)]
        if paths and not (size and _is_literal(size, 1)):
            backwards = [event for event in region.events_of(*BACKWARDS) if loop in event.context.loops]
            yield AccumulationWindow(region, size, loop, paths, backwards, _steps_after(loop, paths) or steps)


def _goes_through_micro_batches(node: ast.For | ast.AsyncFor | ast.While) -> bool:
    """Whether a loop says that it goes through micro-batches: by its names, its pieces, or a batch fetched in each."""
    if isinstance(node, ast.While):
        return mentions_accumulation(node.test)
    if mentions_accumulation(node.target) or mentions_accumulation(node.iter):
        return not _sees_whole_window(node)
    calls = [part for part in walk(node.iter) if isinstance(part, ast.Call)]
    pieces = [call for call in calls if method_called(call) in PIECES and call.args]
    if pieces:  # of inputs and targets; those of one tensor may be the parts of a sequence
        is_of_batch = len(pieces) > 1 or "batch" in code_of(node.iter) or _indexes_with_target(node)
        return is_of_batch and not _sees_whole_window(node)
    if any(dotted_text(call.func) == "range" and len(call.args) == 3 for call in calls):
        return _slices_by(node)
    if _rounds(node) is None:
        return False
    return any(isinstance(part, ast.Call) and last_name(part.func) in FETCHES for part in walk(node))


def _goes_through_pieces(loop: Loop) -> bool:
    """Whether a loop goes through rows that were made micro-batches: ``x.reshape(-1, micro_batch_size, n)``."""
    if isinstance(loop.node, ast.While) or _sees_whole_window(loop.node):
        return False
    given = arguments_given(loop.node.iter) if isinstance(loop.node.iter, ast.Call) else [loop.node.iter]
    values = [value.node for part in given if isinstance(part, ast.Name) for value in loop.frame.values(part)]
    calls = [part for value in values if value is not None for part in walk(value) if isinstance(part, ast.Call)]
    shapes = [call for call in calls if method_called(call) in ("reshape", "view", "unflatten")]
    return bool(shapes) and all(any(map(mentions_accumulation, call.args)) for call in shapes)


def _slices_by(node: ast.For | ast.AsyncFor) -> bool:
    """Whether a loop takes ``x[i : i + size]``, or ``x[i:end]`` with ``end = min(i + size, len(x))``."""
    target = code_of(node.target)
    ends = {target}
    for part in walk(node):
        if isinstance(part, ast.Assign) and any(name in ends for name in _names_in(part.value)):
            ends.update([goal.id for goal in part.targets if isinstance(goal, ast.Name)])
    for part in walk(node):
        if isinstance(part, ast.Slice) and part.lower and part.upper and code_of(part.lower) == target:
            return not ends.isdisjoint(_names_in(part.upper))
    return False


def _indexes_with_target(node: ast.For | ast.AsyncFor) -> bool:
    """Whether a loop takes ``x[rows]`` of ``for rows in torch.randperm(len(x)).split(size)``."""
    target = ast.unparse(node.target)
    return any(isinstance(part, ast.Subscript) and ast.unparse(part.slice) == target for part in walk(node))


def _names_in(node: ast.expr) -> set[str]:
    return {part.id for part in walk(node) if isinstance(part, ast.Name)}


def _sees_whole_window(node: ast.For | ast.AsyncFor) -> bool:
    """Whether each loss is that of the whole window: ``features[:j] + [own] + features[j + 1 :]``, as CLIP has it."""
    target = node.target.id if isinstance(node.target, ast.Name) else None
    slices = [part for part in walk(node) if isinstance(part, ast.Slice) and part.lower is None]
    return any(isinstance(part.upper, ast.Name) and part.upper.id == target for part in slices)


def _rounds(node: ast.For | ast.AsyncFor | ast.While) -> ast.expr | None:
    """Return n of ``for _ in range(n)``."""
    if isinstance(node, ast.While):
        return None
    calls = [part for part in walk(node.iter) if isinstance(part, ast.Call)]  # or `tqdm(range(n))`
    return next((call.args[0] for call in calls if dotted_text(call.func) == "range" and len(call.args) == 1), None)


def _steps_after(loop: Loop, paths: list[ExecutionPath]) -> list[SourceEvent]:
    """Return the steps that follow a loop before the next backward."""
    found: dict[SourceEvent, None] = {}
    for path in paths:
        left = False
        for index, event in enumerate(path.events):
            if loop in event.context.loops:
                left = True
            elif left and event.kind in BACKWARDS:
                break
            elif left and event.kind in STEPS:
                found[path.events[index]] = None
    return list(found)


@functools.lru_cache(maxsize=16)
def _assigned_in(node: ast.AST) -> set[str | None]:
    parts = [part for part in walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    return {dotted_text(part) for part in parts if isinstance(part.ctx, ast.Store)} - {None}


def _is_literal(node: ast.expr, number: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == number and not isinstance(node.value, bool)
