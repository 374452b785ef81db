"""Whether a loss may be scaled although its backward does not show it, and whether a scaler is enabled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding
from ampwise.check.source.precision import argument_of
from ampwise.check.source.scalers import scalers_in

__all__ = ["is_certainly_scaled", "may_be_scaled"]

MOST = 60  # expressions followed back from a backward
SCALES = LazyPattern(r"scal(e|ed|er|ing)", re.IGNORECASE)
# Inside a function that the loss passes through, `self.scale` is more likely that of an attention layer.
SCALES_A_LOSS = LazyPattern(r"\.scale\(|get_scale|loss_scal|scale_loss")
LOSS = LazyPattern(r"loss(es)?$", re.IGNORECASE)
GATHERS = frozenset(("append", "extend", "insert", "add_", "mul_"))


def may_be_scaled(backward: SourceEvent) -> bool:
    """Whether the loss of a plain backward may have been scaled, or comes from code we cannot see."""
    if backward.value is None or not isinstance(backward.node, ast.Call):
        return True
    pending = [PossibleValue(part, backward.frame) for part in [backward.value, *_weights(backward.node)]]
    seen: set[ast.expr] = set()
    while pending:
        value = pending.pop()
        if value.node is None or len(seen) > MOST:
            return True
        if value.node in seen:
            continue
        seen.add(value.node)
        if SCALES.search(ast.unparse(value.node)) or _passes_a_scaling_function(value.node, value.frame):
            return True
        pending += _sources(value.node, value.frame)
    return False


def is_certainly_scaled(step: SourceEvent) -> bool:
    """Whether the scaler of ``scaler.step(optimizer)`` is certainly enabled: made here, without ``enabled=``."""
    if not isinstance(step.node, ast.Call) or not isinstance(step.node.func, ast.Attribute):
        return False
    made = scalers_in(step.node.func.value, step.frame)
    return bool(made) and all(argument_of(call, "enabled") is None for call in made)


def _weights(call: ast.Call) -> list[ast.expr]:
    """Return the arguments that multiply the loss: ``gradient`` in ``loss.backward(gradient)``."""
    return [*call.args, *(word.value for word in call.keywords if word.arg == "gradient")]


def _passes_a_scaling_function(node: ast.expr, frame: Frame) -> bool:
    for part in ast.walk(node):
        target = frame.callee(part) if isinstance(part, ast.Call) else None
        if target is not None and SCALES_A_LOSS.search(target[0].text):
            return True
    return False


def _sources(node: ast.expr, frame: Frame) -> Iterator[PossibleValue]:
    """Yield the values that the names in an expression were computed from, except names that are called."""
    called = {_without_index(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    for part in ast.walk(node):
        if part in called:
            continue
        if isinstance(part, ast.Name):
            yield from _sources_of_name(part, frame)
        elif isinstance(part, ast.Attribute) and frame.class_of(part.value) is not None:
            known = (value for value in frame.values(part) if value.node is not None or LOSS.search(part.attr))
            yield from (value for value in known if value.node is not part)


def _without_index(node: ast.expr) -> ast.expr:
    """Return ``losses`` for ``losses["mse"](x)``: it is called, so it is not a loss."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _sources_of_name(name: ast.Name, frame: Frame) -> Iterator[PossibleValue]:
    function = next((function for function in frame.function.chain() if function.holds(name.id)), None)
    if function is None or frame.role(name) is not None:
        return
    home = next((caller for caller in frame.callers() if caller.function is function), frame)
    if name.id in home.arguments and home.caller is not None:
        yield PossibleValue(home.arguments[name.id], home.caller)
    elif name.id in function.params and LOSS.search(name.id):
        yield PossibleValue(None, home)  # the caller may have scaled it
    for binding in function.bindings.get(name.id, ()):
        yield from (PossibleValue(node, home) for node in _assigned(binding))
    yield from (PossibleValue(node, home) for node in _gathered(name.id, function.node))


def _assigned(binding: Binding) -> Iterator[ast.expr]:
    if binding.value is not None:
        yield binding.value
    elif isinstance(binding.node, ast.Assign | ast.AugAssign):
        yield binding.node.value
    elif isinstance(binding.node, ast.For | ast.AsyncFor):
        yield binding.node.iter


def _gathered(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """Yield what is added to a list or a sum: ``losses.append(scaler.scale(loss))``."""
    for node in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in GATHERS and dotted_text(func.value) == name:
            yield from node.args
