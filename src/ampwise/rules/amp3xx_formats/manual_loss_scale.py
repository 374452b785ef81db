from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, last_name, method_called
from ampwise.check.source.precision import literal_number
from ampwise.check.source.torch_names import SCALER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.steps import Region
    from ampwise.check.source.types import Frame, SourceEvent, SourceFile
    from ampwise.watch.run_events import OptimizerStep

RULE = Rule(
    code="AMP308",
    name="manual-loss-scale",
    severity=Severity.WARNING,
    summary="The loss is scaled by hand instead of by a GradScaler, with no check for inf before the step.",
    why=(
        "A constant scale is too small for some layers or too large for some steps, and nothing checks for inf: one "
        "overflow puts inf or NaN into the weights. A GradScaler skips such a step, lowers the scale, and raises it "
        "again after 2000 clean steps."
    ),
    fix=(
        "Use `torch.amp.GradScaler('cuda')`: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, "
        "`scaler.update()`."
    ),
    bad=("(loss * 1024).backward()\nfor p in model.parameters():\n    p.grad /= 1024\noptimizer.step()"),
    good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
)
NEEDS = ((".backward(",), ("scal", "*"), ("autocast", "loat16", ".half(", "torch.half", "fp16", "FP16"))

DEEPEST = 4  # products and methods followed into a loss
SMALLEST_SCALE = 128  # a smaller factor is more likely a loss weight
LOSS_SCALE = LazyPattern(r"^_?((static|fp16|amp|init|cur|current)_?)*loss_?scal(e|ing|er)(_?(factor|value))?$", re.I)
SCALE_NAME = LazyPattern(
    r"(^|_)(loss_?scal\w*|scale_?factor|static_scale|fp16_scale|grad_?scale|scaler?|scaling)$", re.IGNORECASE
)
AROUND_FP16 = LazyPattern(r"\.half\(|float16|autocast|torch\.half|fp16", re.IGNORECASE)
# Code that checks for inf before the step does more than multiply by a number.
CHECKS_OVERFLOW = LazyPattern(r"overflow|isinf|is_inf|isfinite|is_finite|isnan|is_nan|found_inf|inf_check|float\(.inf")
# Libraries and optimizers that divide by the scale themselves.
UNSCALES_ITSELF = LazyPattern(r"\bapex\b|FP16_Optimizer|scale_loss\(|LossScaler|unscale|deepspeed", re.IGNORECASE)
KEEPS_FACTOR = frozenset(("mean", "sum", "float", "to", "squeeze", "clone", "view", "reshape"))


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if code.uses_framework or not AROUND_FP16.search(text.replace("bfloat16", "")):
        return
    divisors: list[ast.expr] | None = None  # of gradients; computed on demand
    reported = set()
    for region in code.visible_regions:
        for event in region.events_of("backward"):
            factor = _scale_of(event) if event.value is not None and event.node not in reported else None
            if factor is None or _is_checked(event, region):
                continue
            if divisors is None:
                divisors = list(_divisors_of_gradients(code))
            run = {region.trace.frame.function, *region.trace.followed}
            divided = {ast.unparse(node) for node in divisors if code.function_at(node) in run}
            scale = ast.unparse(factor)
            name = scale.rpartition(".")[2]
            if _is_large_power_of_two(factor):
                message = f"the loss is multiplied by a fixed scale of {scale}"
            elif scale in divided and (_number(factor) is not None or SCALE_NAME.search(name)):
                message = f"the loss is scaled by hand, by `{scale}`, and nothing checks for inf before the step"
            elif LOSS_SCALE.search(name) and not UNSCALES_ITSELF.search(text) and not divisors:
                message = f"the loss is multiplied by `{scale}`, but the gradients are never divided by it"
            else:
                continue
            reported.add(event.node)
            yield RULE.at(event.place, message)


def _is_checked(backward: SourceEvent, region: Region) -> bool:
    """Return whether something between a backward and its step checks for overflow, or gets the scale."""
    events = region.events
    steps = [event for event in events[events.index(backward) :] if event.kind == "optimizer step"]
    for step in steps:
        if isinstance(step.node, ast.Call) and any(
            "scal" in ast.unparse(given) for given in arguments_given(step.node)
        ):
            return True
        if step.frame.function is backward.frame.function:
            lines = step.frame.outline.script.lines[backward.line : step.line]
            asked = any(CHECKS_OVERFLOW.search(guard.text) for guard in step.context.guards)
            return asked or CHECKS_OVERFLOW.search("\n".join(lines)) is not None
    # The step is elsewhere, in code that sees the same scale.
    function = backward.frame.function
    around = ast.unparse(function.owner.node) if function.owner is not None else function.text
    return CHECKS_OVERFLOW.search(around) is not None


def _scale_of(event: SourceEvent) -> ast.expr | None:
    """Return the scale in ``(loss * scale).backward()``, or in a preceding ``loss *= scale``."""
    assert event.value is not None
    for value in event.frame.values(event.value):
        found = _factor(value.node, value.frame, 0)
        if found is not None:
            return found
    name = event.value.id if isinstance(event.value, ast.Name) else ""
    for node in _products(event.frame.function.node).get(name, ()):
        if node.lineno < event.line:
            return _constant(node.value, event.frame) or node.value
    return None


def _factor(node: ast.expr | None, frame: Frame, depth: int) -> ast.expr | None:
    """Return the scale that an expression is multiplied by: ``loss * scale``, ``loss.mul(scale / n).mean()``."""
    if depth > DEEPEST or node is None:
        return None
    sides: list[ast.expr] = []
    inner: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = inner = [node.right, node.left]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        sides = node.args[:1] if node.func.attr in ("mul", "mul_") else []
        inner = [node.func.value] if sides or node.func.attr in KEEPS_FACTOR else []
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        inner = [node.left]
    for side in sides:
        if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Div):
            side = side.left
        constant = _constant(side, frame)
        value = _number(constant)
        if value is not None and value >= SMALLEST_SCALE:
            return constant
        is_scaler = isinstance(side, ast.Attribute) and frame.role(side.value) == SCALER  # scaler._scale
        if _has_scale_name(side) and not is_scaler and not _is_weight(side, frame):
            return side
    return next((found for part in inner if (found := _factor(part, frame, depth + 1)) is not None), None)


@functools.lru_cache(maxsize=8)  # called for every backward of a function
def _products(function: ast.AST) -> dict[str, list[ast.AugAssign]]:
    """Map each name to its ``name *= ...`` statements, outermost first, leaving out later ones."""
    found: dict[str, list[ast.AugAssign]] = {}
    for node in walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and isinstance(node.target, ast.Name):
            statements = found.setdefault(node.target.id, [])
            if not statements or node.lineno < statements[-1].lineno:
                statements.append(node)
    return found


def _constant(node: ast.expr, frame: Frame) -> ast.expr | None:
    values = frame.values(node)
    found = values[0].node if len(values) == 1 else None
    return found if _number(found) is not None else None


def _number(node: ast.expr | None) -> float | None:
    """Return the value of a literal such as ``1024`` or ``2 ** 16``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _number(node.left), _number(node.right)
        if base == 2 and exponent is not None and abs(exponent) <= 64:
            return math.ldexp(1.0, int(exponent))
    return literal_number(node)


def _is_large_power_of_two(node: ast.expr) -> bool:
    value = _number(node)
    return value is not None and value >= SMALLEST_SCALE and math.frexp(value)[0] == 0.5


def _has_scale_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and bool(SCALE_NAME.search(ast.unparse(node).rpartition(".")[2]))


def _is_weight(node: ast.expr, frame: Frame) -> bool:
    """Whether a factor is one of micro-batches or of losses: each of its values is small, or ``1 / n``."""
    values = [value for value, _ in frame.values(node)]
    quotients = [isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) for value in values]
    small = [(number := _number(value)) is not None and number < SMALLEST_SCALE for value in values]
    return all(map(max, quotients, small))


def _divisors_of_gradients(code: SourceFile) -> Iterator[ast.expr]:
    """Yield what gradients are divided by: ``p.grad /= s``, ``p.grad.div_(s)``, ``[g * (1 / s) for g in grads]``."""
    loops: list[ast.For | ast.comprehension] = [*code.nodes(ast.For), *code.nodes(ast.comprehension)]
    each = {loop.target.id for loop in loops if isinstance(loop.target, ast.Name) and "grad" in ast.unparse(loop.iter)}

    def is_gradient(node: ast.expr) -> bool:
        return (isinstance(node, ast.Name) and node.id in each) or "grad" in ast.unparse(node)

    operations: list[ast.AugAssign | ast.BinOp] = [*code.nodes(ast.AugAssign), *code.nodes(ast.BinOp)]
    for node in operations:
        target, by = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
        if isinstance(node.op, ast.Div) and is_gradient(target):
            yield by
        elif isinstance(node.op, ast.Mult) and is_gradient(target):
            yield from _inverse_of(by, code)
    for call in code.nodes(ast.Call):
        name = method_called(call) or last_name(call.func)
        if name in ("div_", "div", "mul_", "mul") and isinstance(call.func, ast.Attribute) and call.args:
            target, by = call.func.value, call.args[0]
        elif name in ("_foreach_div_", "_foreach_mul_", "_foreach_div", "_foreach_mul") and len(call.args) > 1:
            target, by = call.args[:2]
        else:
            continue
        if is_gradient(target):
            yield from [by] if "div" in name else _inverse_of(by, code)


def _inverse_of(factor: ast.expr, code: SourceFile) -> Iterator[ast.expr]:
    """Yield s of a factor ``1 / s``, which may have a name."""
    for value, _ in code.frame(code.function_at(factor)).values(factor):
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            yield value.right


def check_event(step: OptimizerStep) -> Findings:
    if step.scaled_by_constant is not None and "fp16" in (*step.precisions, *step.parameters):
        yield RULE.at(
            (step.backward or step.site).place,
            f"the loss is multiplied by a fixed {step.scaled_by_constant:g}, regardless of its gradients",
            evidence={"factor": step.scaled_by_constant},
        )
