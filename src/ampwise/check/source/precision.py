"""Read precision from expressions: dtypes, autocast contexts, and literal switches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise.check.source.cases import Made, cases_of, results_of_closure
from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import dotted_text
from ampwise.check.source.torch_names import AUTOCASTS, BF16, DTYPES, FP16, FP32, SPELLINGS
from ampwise.check.source.tree_walk import walk
from ampwise.finding import Place

# A context manager with such a name is taken for autocast if we cannot see what it does.
AUTOCAST_NAME = LazyPattern(r"autocast|(^|_)amp_?(ctx|context|cast)|mixed_?precision|precision_?(ctx|context)", re.I)
NO_CONTEXT = LazyPattern(r"(^|\.)(nullcontext|suppress|contextlib\.\w+)$")
DEEPEST = 12  # calls into functions that may return an autocast


@dataclass(slots=True, eq=False)
class AutocastContext:
    """Autocast context, as far as it is known from the source."""

    node: ast.expr
    frame: Frame
    device: str | None = None  # None: a variable
    dtypes: frozenset[str] | None = None  # possible dtypes; None: unknown
    dtype_given: bool = False
    enabled: bool | None = None  # None: a variable
    optional: bool = False  # sometimes replaced by a null context
    known: bool = True  # False: recognised by its name only
    manager: ast.expr | None = None  # what the ``with`` enters: a name, a call or a conditional expression
    entered_in: Frame | None = None  # the frame of that ``with``

    def spot(self, seen_from: Place) -> str:
        """Return how a message refers to the line of this autocast."""
        return spot(self.node, self.frame, seen_from)

    @property
    def may_be_on(self) -> bool:
        """Whether it may be on; torch disables one for FP32."""
        return self.enabled is not False and not self.is_surely(FP32)

    def is_surely(self, dtype: str) -> bool:
        return self.dtypes is not None and self.dtypes == {dtype}

    @property
    def surely_fp16(self) -> bool:
        """Whether it is certainly FP16 on a GPU; a device that is a variable counts as a GPU."""
        return self.may_be_on and self.device != "cpu" and self.is_surely(FP16)


def autocast_of(node: ast.expr, frame: Frame) -> AutocastContext | None:
    """Return the autocast context that ``with node:`` enters; None if it is something else."""
    found = _find_autocast(node, frame)
    if found is not None:
        found.manager, found.entered_in = node, frame
    return found


def _find_autocast(node: ast.expr, frame: Frame) -> AutocastContext | None:
    candidates = _held(node, frame) if not isinstance(node, ast.Call) else [PossibleValue(node, frame)]
    by_candidate = [list(_autocasts(value, home)) for value, home in candidates if isinstance(value, ast.Call)]
    found = [autocast for autocasts in by_candidate for autocast in autocasts]
    if not found:
        name = dotted_text(node.func if isinstance(node, ast.Call) else node) or ""
        by_name = not NO_CONTEXT.search(name) and AUTOCAST_NAME.search(name.rpartition(".")[2])
        return AutocastContext(node, frame, known=False) if by_name else None
    first = found[0]
    first.optional = first.optional or len(by_candidate) < len(candidates) or not all(by_candidate)
    for other in found[1:]:
        first.dtypes = None if first.dtypes is None or other.dtypes is None else first.dtypes | other.dtypes
        first.enabled = first.enabled if first.enabled == other.enabled else None
    return first


def entered(manager: ast.expr) -> ast.expr:
    """Return what ``with manager:`` enters: of ``a and b`` only b, of ``a or b`` only a, since an object is true."""
    while isinstance(manager, ast.BoolOp):
        if isinstance(manager.op, ast.Or) and not isinstance(manager.values[0], ast.Call):
            break  # `flag and autocast() or nullcontext()` enters either
        manager = manager.values[-1 if isinstance(manager.op, ast.And) else 0]
    return manager


def dtypes_of(node: ast.expr | None, frame: Frame) -> frozenset[str] | None:
    """Return the dtypes that an expression may be; None if one of them is unknown."""
    if node is None:
        return None
    found: set[str] = set()
    for value, home in frame.values(node):
        if isinstance(value, ast.Attribute | ast.Name):
            qualified = home.outline.imports.qualified(value)
            if qualified not in DTYPES:
                return None
            found.add(DTYPES[qualified])
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            name = value.value.lower()
            found.add(SPELLINGS.get(name, name))
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Dict):
            for part in value.value.values:
                dtypes = dtypes_of(part, home)
                if dtypes is None:
                    return None
                found |= dtypes
        else:
            return None
    return frozenset(found)


def literal_bool(node: ast.expr | None) -> bool | None:
    """Return the value of a literal True or False; None for any other expression.

    A name that holds a literal does not count, since such a constant is meant to be changed.
    """
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


def constant_bool(node: ast.expr | None, frame: Frame) -> bool | None:
    """Return the value of a literal True or False, or of a name that the same function sets to nothing else.

    A constant at the top of a file, or an argument, does not count: it is there to be changed.
    """
    if not isinstance(node, ast.Name) or frame.function.parent is None or node.id in frame.function.params:
        return literal_bool(node)
    if frame.function.home_of(node.id) is not frame.function:
        return None
    values = {literal_bool(binding.value) for binding in frame.function.bindings.get(node.id, ())}
    return values.pop() if len(values) == 1 else None


def literal_number(node: ast.expr | None) -> float | None:
    """Return the value of a literal number; None for any other expression."""
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by keyword or position; None if it is not given."""
    for word in call.keywords:
        if word.arg == name:
            return word.value
    if position is not None and position < len(call.args):
        return None if isinstance(call.args[position], ast.Starred) else call.args[position]
    return None


def _held(node: ast.expr, frame: Frame) -> list[PossibleValue]:
    """Return what a name may hold; for a part of a function's result, or of a table, what is there."""
    found = frame.values(node)
    if any(value.node is None or isinstance(value.node, ast.Subscript) for value in found):
        made = [case.value for case in cases_of(frame, node) if isinstance(case.value, Made)]
        found = [value for value in found if not (made and isinstance(value.node, ast.Subscript))]
        found = [*found, *[PossibleValue(value.node, value.frame) for value in made]]
    return found


def _autocasts(call: ast.Call, frame: Frame) -> Iterator[AutocastContext]:
    """Yield the autocasts that a call makes: itself, through ``partial(autocast, ...)``, or in a function it calls."""
    qualified = frame.qualified(call.func)
    if qualified in AUTOCASTS:
        yield _read_call(call, frame, AUTOCASTS[qualified])
        return
    if (frame.outline.imports.qualified(call.func) or "").partition(".")[0] in ("torch", "contextlib"):
        return
    makers = _held(call.func, frame) if isinstance(call.func, ast.Name | ast.Attribute) else []
    for maker, home in makers:
        if isinstance(maker, ast.Call) and maker.args:
            name = home.qualified(maker.func) or dotted_text(maker.func) or ""
            made = home.qualified(maker.args[0]) if name.rpartition(".")[2] == "partial" else None
            if made in AUTOCASTS:
                autocast = _read_call(call, home, AUTOCASTS[made], partial=maker)
                autocast.frame = frame
                autocast.optional = len(makers) > 1
                yield autocast
        elif isinstance(maker, ast.Attribute | ast.Name):
            made = home.qualified(maker)
            if made in AUTOCASTS:
                yield _read_call(call, frame, AUTOCASTS[made])
    for case in cases_of(frame, call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ():
        for value, home in results_of_closure(case.value, call) if isinstance(case.value, Made) else ():
            made = home.qualified(value.func) if isinstance(value, ast.Call) else None
            if isinstance(value, ast.Call) and made in AUTOCASTS:
                yield _read_call(value, home, AUTOCASTS[made])
    yield from _returned_autocasts(call, frame)


def _returned_autocasts(call: ast.Call, frame: Frame) -> Iterator[AutocastContext]:
    """Yield the autocasts that the function of the script that a call runs returns."""
    target = frame.callee(call)
    if target is None or isinstance(target[0].node, ast.Module) or len(frame.callers()) > DEEPEST:
        return
    inside = frame.enter(target[0], call, target[1])
    parts = list(walk(target[0].node))
    yields = [part for part in parts if isinstance(part, ast.Yield)]
    for node in parts:
        held = [node.value] if isinstance(node, ast.Return | ast.Yield) else []
        if isinstance(node, ast.With) and any(part in yields and part.value is None for part in walk(node)):
            held = [item.context_expr for item in node.items]  # with autocast(): yield
        for value, home in [pair for each in held if each is not None for pair in inside.values(each)]:
            made = home.qualified(value.func) if isinstance(value, ast.Call) and value is not call else None
            if isinstance(value, ast.Call) and made in AUTOCASTS:
                found = _read_call(value, home, AUTOCASTS[made])
                found.optional = isinstance(node, ast.With) and len(yields) > 1
                yield found


def _read_call(call: ast.Call, frame: Frame, device: str | None, partial: ast.Call | None = None) -> AutocastContext:
    """Read one constructor call; ``partial(autocast, ...)`` gives missing arguments."""
    # The two families order their arguments differently: (device_type, dtype, enabled) and (enabled, dtype).
    names = ("device_type", "dtype", "enabled") if device is None else ("enabled", "dtype")
    given = {}
    for position, name in enumerate(names):
        found = argument_of(call, name, position)
        if found is None and partial is not None:
            found = argument_of(partial, name, position + 1)
        given[name] = found
    kind = given.get("device_type")
    if kind is not None:
        values = frame.values(kind)
        value = values[0].node if len(values) == 1 else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            device = value.value.partition(":")[0]
    dtype, enabled = given["dtype"], given["enabled"]
    is_open = any(word.arg is None for one in (call, partial) if one is not None for word in one.keywords)  # **kwargs
    default = None if is_open else frozenset([BF16 if device in ("cpu", "xla", "tpu") else FP16])
    return AutocastContext(
        node=call,
        frame=frame,
        device=device,
        dtypes=dtypes_of(dtype, frame) if dtype is not None else default,
        dtype_given=dtype is not None,
        enabled=constant_bool(enabled, frame) if enabled is not None else None if is_open else True,
    )
