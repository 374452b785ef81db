"""Hugging Face Accelerate where it scales the loss: ``accelerator.backward`` scales, a prepared optimizer unscales."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.cases import Known, Option, cases_of
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import code_of, last_name, method_called
from ampwise.check.source.precision import argument_of, literal_bool
from ampwise.check.source.tree_walk import walk

if TYPE_CHECKING:
    from ampwise.check.source.frame import Frame
    from ampwise.check.source.project import SourceFile

ITS_SCALER = "the accelerator's scaler"  # the key of its events
ACCELERATORS = frozenset(("accelerate.Accelerator", "accelerate.accelerator.Accelerator"))
FP16_BY_NAME = LazyPattern(r"""["']fp16["']""")


def is_accelerator(node: ast.expr, frame: Frame) -> bool:
    """Whether an object is an ``Accelerator``: made in this file or, as a parameter, called one."""
    if "Accelerator" not in frame.outline.script.text or not isinstance(node, ast.Name | ast.Attribute):
        return False
    return last_name(node) == "accelerator" or not ACCELERATORS.isdisjoint(frame.makers(node))


def accelerates_in_fp16(frame: Frame) -> bool:
    """Whether the file of a frame makes an Accelerator that may train in FP16, with a GradScaler of its own."""
    text = frame.outline.script.text
    return "Accelerator(" in text and "GradScaler(" not in text and _may_scale(frame.lookup.code(frame.outline.path))


@functools.lru_cache(maxsize=64)  # asked for each backward and each step
def _may_scale(code: SourceFile) -> bool:
    return any(_is_in_fp16(call, code) for call in accelerators_made(code))


def accelerators_made(code: SourceFile) -> list[ast.Call]:
    calls = [call for call in code.nodes(ast.Call) if last_name(call.func) == "Accelerator"]
    return [call for call in calls if code.frame(code.function_at(call)).qualified(call.func) in ACCELERATORS]


def _is_in_fp16(call: ast.Call, code: SourceFile) -> bool:
    if argument_of(call, "deepspeed_plugin") is not None:
        return False  # DeepSpeed scales by itself
    old = argument_of(call, "fp16")
    if old is not None and literal_bool(old) is not False:
        return True
    asked = argument_of(call, "mixed_precision")
    values = [case.value for case in cases_of(code.frame(code.function_at(call)), asked)] if asked is not None else []
    named = FP16_BY_NAME.search(code.script.text) is not None
    return any(
        (isinstance(value, Known) and value.value == "fp16") or (isinstance(value, Option) and named)
        for value in values
    )


def is_prepared(thing: ast.expr, code: SourceFile) -> bool:
    """Whether an accelerator certainly prepared an optimizer or a model: ``net = accelerator.prepare(net)``."""
    for call in code.nodes(ast.Call):
        if method_called(call) not in ("prepare", "prepare_optimizer", "prepare_model"):
            continue
        statement = code.script.statement(call)
        frame = code.frame(code.function_at(call))
        if isinstance(statement, ast.Assign) and statement.value is call and is_accelerator(call.func.value, frame):  # type: ignore[attr-defined]
            goals = [
                part for goal in statement.targets for part in (goal.elts if isinstance(goal, ast.Tuple) else [goal])
            ]
            if last_name(thing) in [last_name(goal) for goal in goals]:
                return True
    return False


def holds_back(scheduler: ast.expr, code: SourceFile) -> bool:
    """Whether the accelerator may move a scheduler only after applied steps: it prepared it, or we cannot see it."""
    for call in accelerators_made(code):
        given = argument_of(call, "step_scheduler_with_optimizer")
        if given is not None:
            return literal_bool(given) is not False
    prepared = [call for call in code.nodes(ast.Call) if method_called(call) in ("prepare", "prepare_scheduler")]
    names: set[str] = set()
    for call in prepared:
        statement = code.script.statement(call)
        parts = [*call.args, *(statement.targets if isinstance(statement, ast.Assign) else ())]
        if call.keywords or any(isinstance(part, ast.Starred | ast.Call | ast.Dict) for part in call.args):
            return True
        names |= {
            last_name(part) for each in parts for part in walk(each) if isinstance(part, ast.Name | ast.Attribute)
        }
    while isinstance(scheduler, ast.Subscript):
        scheduler = scheduler.value
    return not prepared or last_name(scheduler) in names


def cleared_while_accumulating(code: SourceFile) -> Iterator[ast.Call]:
    """Yield each ``zero_grad()`` before the backward in ``with accelerator.accumulate(model):``.

    A prepared optimizer clears only in the last micro-batch: there, what the others have added is lost.
    """
    for block in code.nodes(ast.With) if ".accumulate(" in code.script.text else ():
        managers = [item.context_expr for item in block.items if method_called(item.context_expr) == "accumulate"]
        frame = code.frame(code.function_at(block))
        if not any(is_accelerator(call.func.value, frame) for call in managers) or not _accumulates(code):  # type: ignore[attr-defined]
            continue
        calls = [part for part in walk(block) if isinstance(part, ast.Call)]
        backwards = [call.lineno for call in calls if method_called(call) == "backward"]
        for call in calls:
            is_first = method_called(call) == "zero_grad" and call.lineno < min(backwards, default=0)
            if is_first and not any("sync_gradients" in code_of(test) for test in _tests_around(call, block, code)):
                yield call


def _accumulates(code: SourceFile) -> bool:
    """Whether an Accelerator of this file may have more than one micro-batch per step."""
    for call in accelerators_made(code):
        if argument_of(call, "gradient_accumulation_plugin") is not None:
            return True
        size = argument_of(call, "gradient_accumulation_steps")
        cases = cases_of(code.frame(code.function_at(call)), size) if size is not None else []
        if any(not isinstance(case.value, Known) or case.value.value != 1 for case in cases):
            return True
    return False


def _tests_around(node: ast.AST, block: ast.With, code: SourceFile) -> Iterator[ast.expr]:
    while node is not block:
        node = code.script.parents[node]
        if isinstance(node, ast.If):
            yield node.test
