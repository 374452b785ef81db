"""Read precision from expressions: dtypes, autocast contexts, and literal switches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise.check.source.frame import Frame, PossibleValue
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.line_references import spot
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import ClassOutline, FunctionOutline
from ampwise.check.source.torch_names import AUTOCASTS, BF16, DTYPES, FP16
from ampwise.finding import Place

__all__ = ["AutocastContext", "argument_of", "autocast_of", "dtypes_of", "literal_bool", "literal_number"]

# A context manager with such a name is taken for autocast if we cannot see what it does.
AUTOCAST_NAME = LazyPattern(r"autocast|(^|_)amp_?(ctx|context|cast)|mixed_?precision|precision_?(ctx|context)", re.I)
NO_CONTEXT = LazyPattern(r"(^|\.)(nullcontext|suppress|contextlib\.\w+)$")
SPELLINGS = {"bf16": BF16, "bfloat16": BF16, "fp16": FP16, "float16": FP16, "half": FP16, "16-mixed": FP16}


class AutocastContext:
    """Autocast context, as far as it is known from the source."""

    __slots__ = ("device", "dtype_given", "dtypes", "enabled", "frame", "known", "node", "optional")

    def __init__(
        self,
        node: ast.expr,
        frame: Frame,
        device: str | None = None,
        dtypes: frozenset[str] | None = None,
        dtype_given: bool = False,
        enabled: bool | None = None,
        optional: bool = False,
        known: bool = True,
    ) -> None:
        self.node, self.frame = node, frame
        self.device = device  # None: a variable
        self.dtypes = dtypes  # possible dtypes; None: unknown
        self.dtype_given = dtype_given
        self.enabled = enabled  # None: a variable
        self.optional = optional  # sometimes replaced by a null context
        self.known = known  # False: recognised by its name only

    def spot(self, seen_from: Place) -> str:
        """Return how a message refers to the line of this autocast."""
        return spot(self.node, self.frame, seen_from)

    @property
    def may_be_on(self) -> bool:
        return self.enabled is not False

    def is_surely(self, dtype: str) -> bool:
        return self.dtypes is not None and self.dtypes == {dtype}

    @property
    def surely_fp16(self) -> bool:
        """Whether it is certainly FP16 on a GPU; a device that is a variable counts as a GPU."""
        return self.may_be_on and self.device != "cpu" and self.is_surely(FP16)


def autocast_of(node: ast.expr, frame: Frame) -> AutocastContext | None:
    """Return the autocast context that ``with node:`` enters; None if it is something else."""
    candidates = frame.values(node) if not isinstance(node, ast.Call) else [PossibleValue(node, frame)]
    by_candidate = [list(_autocasts(value)) for value in candidates]
    found = [autocast for autocasts in by_candidate for autocast in autocasts]
    if not found:
        return _by_name(node, frame)
    first = found[0]
    first.optional = first.optional or not all(by_candidate)
    for other in found[1:]:
        first.dtypes = None if first.dtypes is None or other.dtypes is None else first.dtypes | other.dtypes
        first.enabled = first.enabled if first.enabled == other.enabled else None
    return first


def dtypes_of(node: ast.expr | None, frame: Frame) -> frozenset[str] | None:
    """Return the dtypes that an expression may be; None if one of them is unknown."""
    if node is None:
        return None
    found: set[str] = set()
    for value in frame.values(node):
        dtypes = _dtypes_of_value(value)
        if dtypes is None:
            return None
        found |= dtypes
    return frozenset(found)


def literal_bool(node: ast.expr | None) -> bool | None:
    """Return the value of a literal True or False; None for any other expression.

    A name that holds a literal does not count, since such a constant is meant to be changed.
    """
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


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


def _autocasts(value: PossibleValue) -> Iterator[AutocastContext]:
    node, frame = value.node, value.frame
    if isinstance(node, ast.Call):
        qualified = frame.qualified(node.func)
        if qualified in AUTOCASTS:
            yield _autocast(node, frame, AUTOCASTS[qualified], [])
        elif (frame.outline.imports.qualified(node.func) or "").partition(".")[0] not in ("torch", "contextlib"):
            yield from _made_by_call(node, frame)


def _made_by_call(call: ast.Call, frame: Frame) -> Iterator[AutocastContext]:
    """Yield the autocasts made by ``partial(autocast, ...)`` or returned by a function of the script."""
    for value in frame.values(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ():
        inner = value.node
        if isinstance(inner, ast.Call) and _is_partial(inner, value.frame) and inner.args:
            qualified = value.frame.qualified(inner.args[0])
            if qualified in AUTOCASTS:
                made = _autocast(call, value.frame, AUTOCASTS[qualified], [(inner, 1)])
                made.frame = frame
                made.optional = made.optional or len(frame.values(call.func)) > 1
                yield made
        elif isinstance(inner, ast.Attribute | ast.Name) and value.frame.qualified(inner) in AUTOCASTS:
            yield _autocast(call, frame, AUTOCASTS[value.frame.qualified(inner) or ""], [])
    target = frame.callee(call)
    if target is not None and not isinstance(target[0].node, ast.Module) and frame.depth() < 12:
        yield from _returned(target[0], target[1], call, frame)


def _returned(
    function: FunctionOutline, owner: ClassOutline | None, call: ast.Call, frame: Frame
) -> Iterator[AutocastContext]:
    inside = frame.enter(function, call, owner)
    for node in ast.walk(function.node):
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            for value in inside.values(node.value):
                if isinstance(value.node, ast.Call) and value.node is not call:
                    qualified = value.frame.qualified(value.node.func)
                    if qualified in AUTOCASTS:
                        yield _autocast(value.node, value.frame, AUTOCASTS[qualified], [])


def _autocast(call: ast.Call, frame: Frame, device: str | None, further: list[tuple[ast.Call, int]]) -> AutocastContext:
    """Read one constructor call; ``further`` calls, such as partial's, give missing arguments."""
    shift = 0 if device is None else -1  # torch.cuda.amp.autocast(enabled, dtype) has no device

    def argument(name: str, position: int) -> ast.expr | None:
        for source, skip in [(call, 0), *further]:
            found = argument_of(source, name, position + skip if position + skip >= 0 else None)
            if found is not None:
                return found
        return None

    if device is None:
        device = _text(argument("device_type", 0), frame)
    # The two families order their arguments differently: (device_type, dtype, enabled) and (enabled, dtype).
    dtype = argument("dtype", 1)
    enabled = argument("enabled", 2 if shift == 0 else 0)
    dtypes = dtypes_of(dtype, frame) if dtype is not None else _default_dtypes(device)
    return AutocastContext(
        node=call,
        frame=frame,
        device=device,
        dtypes=dtypes,
        dtype_given=dtype is not None,
        enabled=True if enabled is None else literal_bool(enabled),
    )


def _default_dtypes(device: str | None) -> frozenset[str]:
    return frozenset([BF16 if device in ("cpu", "xla", "tpu") else FP16])


def _text(node: ast.expr | None, frame: Frame) -> str | None:
    if node is None:
        return None
    texts = {
        value.node.value.partition(":")[0]
        for value in frame.values(node)
        if isinstance(value.node, ast.Constant) and isinstance(value.node.value, str)
    }
    return texts.pop() if len(texts) == 1 and len(frame.values(node)) == 1 else None


def _by_name(node: ast.expr, frame: Frame) -> AutocastContext | None:
    name = dotted_text(node.func if isinstance(node, ast.Call) else node) or ""
    if NO_CONTEXT.search(name) or not AUTOCAST_NAME.search(name.rpartition(".")[2]):
        return None
    return AutocastContext(node, frame, known=False)


def _is_partial(call: ast.Call, frame: Frame) -> bool:
    name = frame.qualified(call.func) or dotted_text(call.func) or ""
    return name.rpartition(".")[2] == "partial"


def _dtypes_of_value(value: PossibleValue) -> set[str] | None:
    node, frame = value.node, value.frame
    if isinstance(node, ast.Attribute | ast.Name):
        qualified = frame.outline.imports.qualified(node)
        return {DTYPES[qualified]} if qualified in DTYPES else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.lower()
        return {SPELLINGS.get(name, name)}
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        parts = [dtypes_of(part, frame) for part in node.value.values]
        return None if None in parts else {name for part in parts if part for name in part}
    return None
