from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampwise.check.source.end_block import end_block_before
from ampwise.check.source.guards import guards_of
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import last_name, method_called
from ampwise.check.source.precision import argument_of, autocast_of
from ampwise.check.source.statement_order import LOOPS, SCOPES
from ampwise.check.source.torch_names import AUTOCASTS
from ampwise.check.source.tree_walk import walk
from ampwise.check.source.without_autocast import first_that_needs_autocast
from ampwise.finding import Edit, Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import AutocastContext, Frame, SourceEvent, SourceFile
    from ampwise.watch.run_events import Backward

RULE = Rule(
    code="AMP111",
    name="backward-in-autocast",
    severity=Severity.WARNING,
    summary="`backward()` is called inside the autocast region.",
    why=(
        "Backward operations run in the dtype of their forward operation, whether autocast is on or not. Autocast "
        "then only affects operations that have no recorded dtype: custom functions, hooks and double backward get "
        "casts they were not written for. torch recommends against it."
    ),
    fix="End the `with` block after the loss, and call `backward()` outside it.",
    bad='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\n    scaler.scale(loss).backward()',
    good='with torch.autocast("cuda"):\n    loss = loss_fn(model(x), y)\nscaler.scale(loss).backward()',
    fixable="sometimes",
)
NEEDS = (("autocast", "amp", "ixed"), (".backward(", "scaler("))

BACKWARDS = ("backward", "scaled backward")
PURE_CONTEXTS = {*AUTOCASTS, "contextlib.nullcontext", "contextlib.suppress"}
# timm's NativeScaler and its copies: loss_scaler(loss, optimizer, parameters=model.parameters())
RUNS_BACKWARD = LazyPattern(r"^(loss|grad|amp)_?scaler$")


def check_source(code: SourceFile) -> Findings:
    seen = set()
    for event in code.events:
        autocast = event.context.autocast
        if event.kind not in BACKWARDS or autocast is None or event.node in seen:
            continue
        # One that is known by its name only: the scaler confirms that it is autocast.
        is_certain = autocast.known or event.kind == "scaled backward"
        if is_certain and autocast.may_be_on and not _is_off(event, autocast):
            seen.add(event.node)
            edits, fix, is_safe = _after_the_block(event, code)
            yield RULE.at(
                event.place,
                f"this backward() runs inside the autocast region of {autocast.spot(event.place)}",
                fix=fix,
                edits=edits,
                safe=is_safe,
            )

    for site in code.calls:
        autocast, call = site.context.autocast, site.call
        if autocast is None or not autocast.known or autocast.enabled is not True or call in seen:
            continue
        is_scaler = RUNS_BACKWARD.search(last_name(call.func)) and argument_of(call, "parameters") is not None
        if is_scaler and len(call.args) > 1 and site.context.frame.callee(call) is None:
            seen.add(call)
            place = code.script.place(call)
            where = autocast.spot(place)
            yield RULE.at(place, f"this call runs the backward, inside the autocast region of {where}")


def _is_off(event: SourceEvent, autocast: AutocastContext) -> bool:
    """Return whether the branch of the backward is the one in which ``autocast(enabled=use_amp)`` is disabled."""
    enabled = argument_of(autocast.node, "enabled") if isinstance(autocast.node, ast.Call) else None
    if enabled is None:
        return False
    needed = {guard.text: guard.holds for guard in guards_of(enabled, event.frame)[0]}
    return any(needed.get(guard.text, guard.holds) != guard.holds for guard in event.context.guards)


def _after_the_block(event: SourceEvent, code: SourceFile) -> tuple[tuple[Edit, ...], str | None, bool]:
    """Return the edit that ends the ``with`` before the backward, what to do, and whether the edit is safe.

    What follows the backward in the block is moved, too: calls of the step and logging do the same without autocast.
    """
    frame = event.frame
    script = frame.outline.script
    block = _autocast_block(event, frame)
    if block is None:
        decorated = any(autocast_of(decorator, frame) for decorator in frame.function.decorators)
        return (
            (),
            "Replace the decorator by a `with` around the forward pass and the loss."
            if decorated
            else RULE.without_edit("the `with` is in another function"),
            True,
        )
    if len(block.items) > 1:
        return (), "Give autocast a `with` of its own, and end it after the loss.", True
    inside = [set(walk(statement)) for statement in block.body]
    at = next(index for index, nodes in enumerate(inside) if event.node in nodes)
    backwards = [other.node for other in code.events if other.kind in BACKWARDS]
    forwards = [other.node for other in code.events if other.kind == "forward"]
    start, unclear = len(block.body), None
    for index in reversed(range(len(block.body))):
        has_backward = any(node in inside[index] for node in backwards)
        needs = first_that_needs_autocast(block.body[index], frame)
        is_forward = isinstance(needs, ast.BinOp) or not inside[index].isdisjoint(forwards)
        if needs is not None and (has_backward or start < len(block.body) or is_forward):
            break
        start, unclear = (index if has_backward else start), needs or unclear
    if at < start:
        return (), _advice(block.body[at], frame), True
    while start > 1 and method_called(getattr(block.body[start - 1], "value", None)) == "zero_grad":
        start -= 1  # it belongs to the step, as do the comments above it
    edit = end_block_before(script, block, start) if start else None
    if edit is None:
        return (), RULE.without_edit("the block would have nothing left, or its layout does not allow it"), True
    doubt = None
    if not frame.makers(block.items[0].context_expr) <= PURE_CONTEXTS:
        doubt = "it is unclear what else the `with` does"
    elif unclear is not None:
        doubt = f"line {unclear.lineno} would then run without autocast, too"
    return (edit,), f"{RULE.fix} Not a safe fix: {doubt}." if doubt else None, doubt is None


def _autocast_block(event: SourceEvent, frame: Frame) -> ast.With | None:
    """Return the innermost ``with`` around the backward, in its function, that enters autocast."""
    parents = frame.outline.script.parents
    node: ast.AST = event.node
    while node in parents and not isinstance(node, SCOPES):
        node = parents[node]
        if isinstance(node, ast.With) and any(autocast_of(item.context_expr, frame) for item in node.items):
            return node
    return None


def _advice(statement: ast.stmt, frame: Frame) -> str:
    """Return what to do where the statements from the backward on cannot simply be moved out of the block."""
    if first_that_needs_autocast(statement, frame) is None:
        return "End the `with` before `backward()`, and begin another one for the forward pass after it."
    if isinstance(statement, ast.Expr):
        return "Assign the loss to a variable inside the `with`, and call `backward()` on it after the block."
    place = "into the loop" if isinstance(statement, LOOPS) else f"into the block of line {statement.lineno}"
    return f"Move the `with` {place}, around the forward pass and the loss only."


def check_event(backward: Backward) -> Findings:
    if backward.autocast is not None:
        yield RULE.at(
            backward.site.place, f"`backward` is called inside an autocast region in {backward.autocast.upper()}"
        )
