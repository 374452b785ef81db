"""A loss scale that is read once and used after ``update()`` may have changed it."""

from __future__ import annotations

import ast
import bisect
import functools
import re
from collections.abc import Collection, Iterator

from ampwise.check.source.events import Loop
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.project import SourceFile
from ampwise.check.source.torch_names import SCALER
from ampwise.check.source.walk import CodeSite, CodeTrace
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP112",
    name="stale-scale",
    severity=Severity.ERROR,
    summary="A loss scale read before `scaler.update()` is used after it.",
    why=(
        "`update()` halves the scale after an overflow and doubles it after 2000 clean steps. A copy taken earlier "
        "then multiplies or divides by the wrong power of two, and the resulting gradients or norms are off by that "
        "factor without any error."
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
NEEDS = (("caler",), ("get_scale", "._scale"), (".backward(",))

# What a loss scale multiplies or divides.
SCALED_THINGS = LazyPattern(r"grad|norm|loss", re.IGNORECASE)
IN_PLACE = frozenset(("mul_", "div_", "mul", "div", "_foreach_mul_", "_foreach_div_"))


def check(code: SourceFile) -> Iterator[Finding]:
    for trace in code.traces:
        yield from _stale_in(trace)


def _stale_in(trace: CodeTrace) -> Iterator[Finding]:
    taken = _scales_taken(trace)
    if not taken:
        return
    assigned = _assignments(trace, set(taken))
    assigned_in = {key: {loop for site in sites for loop in site.context.loops} for key, sites in assigned.items()}
    reported: set[tuple[str, ast.AST]] = set()
    for site in trace.statements:
        for key, used in _uses(site, taken):
            first = taken[key]
            stale = _from_before_the_loop(first, site, assigned_in[key], trace) or _from_before_the_update(
                first, site, assigned[key], trace
            )
            if stale and (key, site.node) not in reported:
                reported.add((key, site.node))
                place = site.context.frame.outline.script.place(used)
                line = spot(first.node, first.context.frame, place)
                yield RULE.at(place, f"this scale was read in {line}; update() may have changed it since")


# -- where a scale is stored ------------------------------------------------------------------------------


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
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "float" and value.args:
        return _reads_scale(value.args[0], frame)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    inner = value.func.value
    if value.func.attr == "get_scale":
        return frame.role(inner) == SCALER
    if value.func.attr in ("item", "clone", "double", "reciprocal", "float"):
        live = isinstance(inner, ast.Attribute) and inner.attr == "_scale" and frame.role(inner.value) == SCALER
        return live or _reads_scale(inner, frame)
    return False


def _assignments(trace: CodeTrace, keys: set[str]) -> dict[str, list[CodeSite]]:
    found: dict[str, list[CodeSite]] = {key: [] for key in keys}
    for site in trace.statements:
        for part in ast.walk(site.node):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                key = site.context.frame.key(part)
                if key in found:
                    found[key].append(site)
    return found


# -- where it is used -------------------------------------------------------------------------------------


def _uses(site: CodeSite, keys: Collection[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield stored scales that multiply or divide a loss, a gradient or a norm; comparing scales is fine."""
    frame = site.context.frame
    for part in ast.walk(site.node):
        factor, scaled = _factor_and_scaled(part)
        if factor is None or not SCALED_THINGS.search(scaled):
            continue
        for name in ast.walk(factor):
            if isinstance(name, ast.Name | ast.Attribute) and (key := frame.key(name)) in keys:
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


# -- whether it is stale ----------------------------------------------------------------------------------


def _from_before_the_loop(taken: CodeSite, use: CodeSite, assigned_in: set[Loop], trace: CodeTrace) -> bool:
    """Return whether it was read outside a loop that updates the scaler and uses the copy, and never again inside."""
    outside, inside = taken.context.loops, use.context.loops
    if inside[: len(outside)] != outside or len(inside) == len(outside):
        return False
    loops = inside[len(outside) :]
    if not assigned_in.isdisjoint(loops):
        return False
    return not _loops_that_update(trace).isdisjoint(loops)


def _from_before_the_update(taken: CodeSite, use: CodeSite, assigned: list[CodeSite], trace: CodeTrace) -> bool:
    """Return whether it was read, then update() and a backward followed, then it was used, in one function and loop."""
    if len(assigned) != 1 or taken.context.frame is not use.context.frame or taken.context.loops != use.context.loops:
        return False
    if taken.context.guards != use.context.guards:
        return False
    last = _line(use)
    update = _next(_lines(trace, "update").get(taken.context.frame, []), _line(taken))
    return update <= last and _next(_lines(trace, "scaled backward").get(taken.context.frame, []), update) <= last


def _next(lines: list[int], line: float) -> float:
    """Return the first of these lines after another; infinite if there is none."""
    index = bisect.bisect_right(lines, line)
    return lines[index] if index < len(lines) else float("inf")


def _line(site: CodeSite) -> int:
    return getattr(site.node, "lineno", 0)


@functools.lru_cache(maxsize=2)  # called for every use in a trace
def _loops_that_update(trace: CodeTrace) -> set[Loop]:
    return {loop for event in trace.events() if event.kind == "update" for loop in event.context.loops}


@functools.lru_cache(maxsize=2)
def _lines(trace: CodeTrace, kind: str) -> dict[Frame, list[int]]:
    """Return the lines of the events of one kind, sorted, by frame."""
    found: dict[Frame, list[int]] = {}
    for event in trace.events():
        if event.kind == kind:
            found.setdefault(event.frame, []).append(event.line)
    return {frame: sorted(lines) for frame, lines in found.items()}
