from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import method_called
from ampwise.check.source.torch_names import SCALER
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text, scale_text

if TYPE_CHECKING:
    from ampwise.check.source.types import CodeSite, CodeTrace, Frame, SourceFile
    from ampwise.finding import Place
    from ampwise.watch.run_events import ScaleInLoss

RULE = Rule(
    code="AMP112",
    name="stale-scale",
    severity=Severity.ERROR,
    summary="A loss scale read before `scaler.update()` is used after it, or is left in a part of the loss.",
    why=(
        "`update()` halves the scale after an overflow and doubles it after 2000 clean steps. A copy taken earlier "
        "then multiplies or divides by the wrong power of two, and the resulting gradients or norms are off by that "
        "factor without any error. So is a penalty of the gradients of `autograd.grad(scaler.scale(...), ...)` that "
        "are not divided by the scale: the scaler divides only the gradients of the optimizer's parameters."
    ),
    fix="Read `scaler.get_scale()` where it is used, or call `scaler.unscale_(optimizer)` instead.",
    bad=(
        "scale = scaler.get_scale()\nfor x, y in loader:\n    scaler.scale(loss_fn(model(x), y)).backward()\n"
        "    norm = grad_norm(model) / scale\n    scaler.step(optimizer)\n    scaler.update()"
    ),
    good=(
        "for x, y in loader:\n    scaler.scale(loss_fn(model(x), y)).backward()\n"
        "    norm = grad_norm(model) / scaler.get_scale()\n    scaler.step(optimizer)\n    scaler.update()"
    ),
)
UNSCALE = (
    "Divide the gradients by the scale before you use them, here and wherever `scaler.scale` is called in the loss:\n"
    "    grads = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)\n"
    "    grads = [each / scaler.get_scale() for each in grads]"
)
NEEDS = (("caler",), ("get_scale", "._scale"), ("backward(",))

# What a loss scale multiplies or divides.
SCALED_THINGS = LazyPattern(r"grad|norm|loss", re.IGNORECASE)
IN_PLACE = frozenset(("mul_", "div_", "mul", "div", "_foreach_mul_", "_foreach_div_"))


def check_event(left: ScaleInLoss) -> Findings:
    losses = [number_text(each) for each in (left.loss, left.at_half)]
    scales = [scale_text(each) for each in (left.scale, left.scale / 2)]
    yield RULE.at(
        left.site.place,
        f"a part of the loss is still multiplied by this loss scale: in a replay of the step, the loss is {losses[0]} "
        f"at a scale of {scales[0]}, and {losses[1]} at {scales[1]}",
        fix=UNSCALE,
    )


def check_source(code: SourceFile) -> Findings:
    for trace in code.traces:
        for place in _divided_by_the_next_scale(trace):
            yield RULE.at(place, "this loss was scaled before update(), and is divided by the scale after it")
        taken = _scales_taken(trace)
        if not taken:
            continue
        assigned = _assignments(trace, taken)
        loops = {key: {loop for site in sites for loop in site.context.loops} for key, sites in assigned.items()}
        updating = {loop for event in trace.events() if event.kind == "update" for loop in event.context.loops}
        lines: dict[tuple[str, Frame], list[int]] = {}  # of the events, sorted
        for event in sorted(trace.events(), key=lambda event: event.line):
            lines.setdefault((event.kind, event.frame), []).append(event.line)
        reported: set[tuple[str, ast.AST]] = set()
        for site in trace.statements:
            for key, used in _uses(site, taken):
                first = taken[key]
                # Loops that use the copy and do not read the scale: one that updates it makes the copy stale.
                outside, inside = first.context.loops, site.context.loops
                around = inside[len(outside) :] if inside[: len(outside)] == outside else ()
                stale = not updating.isdisjoint(around) and loops[key].isdisjoint(around)
                stale = stale or (len(assigned[key]) == 1 and _from_before_the_update(first, site, lines))
                if stale and (key, site.node) not in reported:
                    reported.add((key, site.node))
                    place = site.context.frame.outline.script.place(used)
                    line = spot(first.node, first.context.frame, place)
                    yield RULE.at(place, f"this scale was read in {line}; update() may have changed it since")


def _divided_by_the_next_scale(trace: CodeTrace) -> Iterator[Place]:
    """Yield ``loss / scaler.get_scale()`` after an update, where ``loss = scaler.scale(loss)`` was before it."""
    scaled: dict[str, CodeSite] = {}  # losses
    read: dict[str, CodeSite] = {}  # names that hold the scale, where they were last assigned
    for site in trace.statements:
        node, frame = site.node, site.context.frame
        for part in walk(node) if scaled else ():
            if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Div):
                continue
            keys = [frame.key(name) for name in walk(part.left) if isinstance(name, ast.Name | ast.Attribute)]
            loss = next((scaled[key] for key in keys if key in scaled), None)
            divisor = frame.key(part.right) if isinstance(part.right, ast.Name | ast.Attribute) else None
            scale = site if _reads_scale(part.right, frame) else read.get(divisor or "")
            if loss is not None and scale is not None and _is_update_between(loss, scale, trace):
                yield frame.outline.script.place(part)
        if not isinstance(node, ast.Assign):
            continue
        is_scaled = any(method_called(part) == "scale" and _is_scaler_call(part, frame) for part in walk(node.value))
        for target in node.targets:
            key = frame.key(target) if isinstance(target, ast.Name | ast.Attribute) else None
            if key is not None:
                scaled.pop(key, None)
                read.pop(key, None)
                if is_scaled:
                    scaled[key] = site
                elif _reads_scale(node.value.body if isinstance(node.value, ast.IfExp) else node.value, frame):
                    read[key] = site


def _is_scaler_call(call: ast.AST, frame: Frame) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and frame.role(call.func.value) == SCALER


def _is_update_between(loss: CodeSite, scale: CodeSite, trace: CodeTrace) -> bool:
    """Return whether an update, or a function we cannot see that gets the loss, runs between two statements."""
    home = loss.context.frame
    if scale.context.frame is not home or scale.context.loops != loss.context.loops:
        return False
    between = range(getattr(loss.node, "lineno", 0) + 1, getattr(scale.node, "lineno", 0) + 1)
    steps = ("update", "scaler step", "optimizer step")
    found = [event for event in trace.events() if event.kind in steps and home in event.frame.callers()]
    for event in found:
        calls = [frame.call for frame in event.frame.callers() if frame.caller is home and frame.call is not None]
        if event.kind == "update" and (calls[0] if calls else event.node).lineno in between:
            return True
    if found:
        return False
    assert isinstance(loss.node, ast.Assign)
    names = {ast.unparse(target) for target in loss.node.targets}
    for site in trace.calls:  # self._backward(loss), of a base class, takes the step too
        if site.context.frame is home and site.call.lineno in between and home.callee(site.call) is None:
            called = getattr(site.call.func, "attr", "")
            if "backward" in called and names.intersection(map(ast.unparse, site.call.args)):
                return True
    return False


def _scales_taken(trace: CodeTrace) -> dict[str, CodeSite]:
    """Map each key to the first statement like ``s = scaler.get_scale()`` or ``self.inv = 1 / scaler.get_scale()``."""
    found: dict[str, CodeSite] = {}
    for site in trace.statements:
        if isinstance(site.node, ast.Assign) and _reads_scale(site.node.value, site.context.frame):
            for target in site.node.targets:
                key = site.context.frame.key(target) if isinstance(target, ast.Name | ast.Attribute) else None
                if key is not None:
                    found.setdefault(key, site)
    return found


def _reads_scale(value: ast.expr, frame: Frame) -> bool:
    """Return whether this is the scale or its inverse as a number; the tensor ``scaler._scale`` stays up to date."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and isinstance(value.left, ast.Constant):
        return _reads_scale(value.right, frame)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id == "float" and bool(value.args) and _reads_scale(value.args[0], frame)
    method, inner = method_called(value), getattr(value.func, "value", value)
    if method == "get_scale":
        return frame.role(inner) == SCALER
    if method in ("item", "clone", "double", "reciprocal", "float"):
        live = isinstance(inner, ast.Attribute) and inner.attr == "_scale" and frame.role(inner.value) == SCALER
        return live or _reads_scale(inner, frame)
    return False


def _assignments(trace: CodeTrace, keys: Collection[str]) -> dict[str, list[CodeSite]]:
    found: dict[str, list[CodeSite]] = {key: [] for key in keys}
    for site in trace.statements:
        for part in walk(site.node):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                key = site.context.frame.key(part)
                if key in found:
                    found[key].append(site)
    return found


def _uses(site: CodeSite, keys: Collection[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield stored scales that multiply or divide a loss, a gradient or a norm; comparing scales is fine."""
    of_lists: dict[ast.AST, str] = {}  # [g * inverse for g in gradients]: what `g` runs over
    for part in walk(site.node):
        if isinstance(part, ast.ListComp | ast.GeneratorExp):
            of_lists[part.elt] = ast.unparse(part.generators[0].iter)
        factor, scaled = _factor_and_scaled(part)
        scaled += of_lists.get(part, "")
        for name in walk(factor) if factor is not None and SCALED_THINGS.search(scaled) else ():
            if isinstance(name, ast.Name | ast.Attribute) and (key := site.context.frame.key(name)) in keys:
                assert key is not None
                yield key, name


def _factor_and_scaled(node: ast.AST) -> tuple[ast.expr | None, str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        if isinstance(node.op, ast.Mult) and SCALED_THINGS.search(ast.unparse(node.right)):
            return node.left, ast.unparse(node.right)
        return node.right, ast.unparse(node.left)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
        return node.value, ast.unparse(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE and node.args:
        return node.args[-1], ast.unparse(node.func.value) + " ".join(map(ast.unparse, node.args[:-1]))
    return None, ""


def _from_before_the_update(taken: CodeSite, use: CodeSite, lines: dict[tuple[str, Frame], list[int]]) -> bool:
    """Return whether it was read, then update() and a backward followed, then it was used, in one function and loop."""
    before, after = taken.context, use.context
    if before.frame is not after.frame or before.loops != after.loops or before.guards != after.guards:
        return False
    line: float = getattr(taken.node, "lineno", 0)
    for kind in ("update", "scaled backward"):  # the first one after the line reached so far
        of_kind = lines.get((kind, before.frame), [])
        index = bisect.bisect_right(of_kind, line)
        line = of_kind[index] if index < len(of_kind) else float("inf")
    return line <= getattr(use.node, "lineno", 0)
