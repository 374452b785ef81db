"""Whether a loss may be scaled although its backward does not show it, and whether a scaler is enabled."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.precision import argument_of
from ampwise.check.source.scalers import scalers_in
from ampwise.check.source.tree_walk import walk

MOST = 300  # expressions followed back from a backward
# Not what multiplies logits, images, learning rates or one term of a loss: `logit_scale`, `lr_scale`, `multiscale`.
SCALES = LazyPattern(
    r"scaler|(loss|grad|amp|fp16|static|dynamic|cur|init)_?scal|scaled?_?(loss|grad)|scaled$|scaling$|^_?scale$",
    re.IGNORECASE,
)
# Inside a function that the loss passes through, `self.scale` is more likely that of an attention layer.
SCALES_A_LOSS = LazyPattern(r"\.scale\(|get_scale|loss_scal|scale_loss")
LOSS = LazyPattern(r"loss(es)?$", re.IGNORECASE)
GATHERS = frozenset(("append", "extend", "insert", "add_", "mul_"))


@functools.lru_cache(maxsize=256)  # asked by several rules, for each mode of a step
def may_be_scaled(backward: SourceEvent) -> bool:
    """Whether the loss of a plain backward may have been scaled, or comes from code we cannot see."""
    if backward.value is None or not isinstance(backward.node, ast.Call):
        return True
    # The arguments of loss.backward(gradient) multiply the loss.
    weights = [word.value for word in backward.node.keywords if word.arg == "gradient"]
    pending = [PossibleValue(part, backward.frame) for part in [backward.value, *backward.node.args, *weights]]
    seen: set[ast.expr] = set()
    names: set[tuple[str, Frame]] = set()  # followed so far
    while pending:
        node, frame = pending.pop()
        if node is None:
            return True
        if node in seen or len(seen) > MOST:
            continue
        seen.add(node)
        if any(SCALES.search(name) for name in _names_in(node)) or any(map(_scales_a_loss, walk(node))):
            return True
        for call in (part for part in walk(node) if isinstance(part, ast.Call)):
            target = frame.callee(call)
            if target is not None and SCALES_A_LOSS.search(target[0].text):
                return True
        pending += _sources(node, frame, names)
    return False


def _scales_a_loss(node: ast.AST) -> bool:
    """Whether this is a product of a loss and something that is called a scale of any kind: ``loss * my_scale``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = [dotted_text(side) or "" for side in (node.left, node.right)]
    return any("loss" in side.lower() for side in sides) and any("scal" in side.lower() for side in sides)


def _names_in(node: ast.expr) -> Iterator[str]:
    """Yield the names in an expression, and the keys it looks up; not other strings, such as a table of options."""
    calls = [part for part in walk(node) if isinstance(part, ast.Call) and "loss" not in ast.unparse(part).lower()]
    # compute_logits(images, texts, scale): not of a loss
    of_others = {part for call in calls if isinstance(call.func, ast.Name) for part in call.args}
    for part in walk(node):
        if isinstance(part, ast.Name):
            yield from () if part in of_others and part.id == "scale" else (part.id,)
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
            yield str(part.slice.value)


def is_certainly_scaled(step: SourceEvent) -> bool:
    """Whether the scaler of ``scaler.step(optimizer)`` is certainly enabled: made here, without ``enabled=``."""
    if not isinstance(step.node, ast.Call) or not isinstance(step.node.func, ast.Attribute):
        return False
    made = scalers_in(step.node.func.value, step.frame)
    return bool(made) and all(argument_of(call, "enabled") is None for call in made)


def _sources(node: ast.expr, frame: Frame, names: set[tuple[str, Frame]]) -> Iterator[PossibleValue]:
    """Yield the values that the names in an expression were computed from, except names that are called."""
    called = set()
    for call in (part for part in walk(node) if isinstance(part, ast.Call)):
        func = call.func
        while isinstance(func, ast.Subscript):  # in losses["mse"](x), losses is called, so it is not a loss
            func = func.value
        called.add(func)
        called.update(_called_by_callee(call, frame))
    for part in walk(node):
        if part in called:
            continue
        if isinstance(part, ast.Name):
            if (part.id, frame) not in names:
                names.add((part.id, frame))
                yield from _sources_of_name(part, frame)
        elif isinstance(part, ast.Attribute) and frame.class_of(part.value) is not None:
            known = (value for value in frame.values(part) if value.node is not None or LOSS.search(part.attr))
            yield from (value for value in known if value.node is not part)


def _called_by_callee(call: ast.Call, frame: Frame) -> list[ast.expr]:
    """Return the arguments that the function which a call runs calls: of ``train_one(x, loss_fn)``, the second."""
    target = frame.callee(call)
    if target is None or not any(isinstance(part, ast.Name) and LOSS.search(part.id) for part in call.args):
        return []
    functions = {
        part.func.id for part in walk(target[0].node) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
    }
    given = frame.enter(target[0], call, target[1]).arguments
    return [argument for name, argument in given.items() if name in functions]


def _sources_of_name(name: ast.Name, frame: Frame) -> Iterator[PossibleValue]:
    function = frame.function.home_of(name.id)
    if function is None or frame.role(name) is not None:
        return
    home = next((caller for caller in frame.callers() if caller.function is function), frame)
    if name.id in home.arguments and home.caller is not None:
        yield PossibleValue(home.arguments[name.id], home.caller)
    elif name.id in function.params and LOSS.search(name.id):
        yield PossibleValue(None, home)  # the caller may have scaled it
    for binding in function.bindings.get(name.id, ()):
        if binding.value is not None:
            yield PossibleValue(binding.value, home)
        elif isinstance(binding.node, ast.Assign | ast.AugAssign):
            yield PossibleValue(binding.node.value, home)
        elif isinstance(binding.node, ast.For | ast.AsyncFor):
            yield PossibleValue(binding.node.iter, home)
    for argument in _gathered(function).get(name.id, ()):
        yield PossibleValue(argument, home)


@functools.lru_cache(maxsize=64)  # used for every name of an expression
def _gathered(function: FunctionOutline) -> dict[str, list[ast.expr]]:
    """Return what a function adds to each list or sum: ``losses.append(scaler.scale(loss))``."""
    found: dict[str, list[ast.expr]] = {}
    for node in walk(function.node):
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(func, ast.Attribute) and func.attr in GATHERS:
            found.setdefault(dotted_text(func.value) or "", []).extend(node.args)
    return found
