"""Follow a loss back from its backward to find whether it is divided by the number of micro-batches."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ampwise.check.source.accumulation import ACCUMULATES, AccumulationWindow
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import dotted_text
from ampwise.check.source.outline import Binding, FunctionOutline

__all__ = ["LossNormalisation"]

DEEPEST = 6  # names and calls followed back from a backward
DIVIDES = frozenset(("div", "div_", "true_divide", "divide", "reciprocal"))
# A factor with such a name may be 1 / n.
INVERSE = LazyPattern(r"accum|scale|norm|inv|factor|ratio|weight$|coef", re.IGNORECASE)
GRADIENTS = LazyPattern(r"\.grad\b|(^|\W)grads?\b")
LEARNING_RATE = LazyPattern(r"(^|[\W_])lr\b|learning_rate", re.IGNORECASE)


class LossNormalisation:
    """Whether the losses of an accumulation window may be normalised: divided, summed, or computed out of sight.

    Any division by something other than a literal counts, and so does a division of the gradients, or of the learning
    rate by the window's size, anywhere in the file: a loss counts as not normalised only if that is certain.
    """

    def __init__(self, window: AccumulationWindow) -> None:
        self.size = ast.unparse(window.size) if window.size is not None else ""
        self._known: dict[SourceEvent, bool] = {}
        self._elsewhere: dict[Frame, bool] = {}
        self.names: dict[tuple[str, int], bool] = {}  # in the backwards' own expressions, by frame
        self.functions: dict[FunctionOutline, bool] = {}  # whether they divide by the size

    def may_be(self, backward: SourceEvent) -> bool:
        """Whether the loss of one backward may be normalised; cached for backwards on many paths."""
        if backward not in self._known:
            self._known[backward] = self._find_division(backward)
        return self._known[backward]

    def _find_division(self, backward: SourceEvent) -> bool:
        frame = backward.frame
        if backward.value is None or _arguments_of(backward):
            return True
        if frame not in self._elsewhere:
            self._elsewhere[frame] = _divides_elsewhere(frame, self.size)
        return self._elsewhere[frame] or _Flow(self).divides(backward.value, frame, 0)


def _arguments_of(backward: SourceEvent) -> bool:
    """Whether a backward has its own weights, as in ``loss.backward(gradient)``."""
    call = backward.node
    if not isinstance(call, ast.Call) or dotted_text(call.func) == "torch.autograd.backward":
        return True
    return bool(call.args) or any(word.arg == "gradient" for word in call.keywords)


def _divides_elsewhere(frame: Frame, size: str) -> bool:
    """Whether gradients, the learning rate or a loss in a container (``losses["a"] /= n``) are divided."""
    for target, divisor in _divisions(frame.outline.script.tree):
        if GRADIENTS.search(target) or (LEARNING_RATE.search(target) and _says(size, divisor)):
            return True
    around = (caller.function.node for caller in frame.callers())
    for function in (node for node in around if not isinstance(node, ast.Module)):
        for target, divisor in _divisions(function):
            # A plain name is another loss, or one that _Flow follows.
            kept = "loss" in target.lower() and ".item()" not in target and not target.isidentifier()
            if kept and _says(size, divisor):
                return True
    return False


@functools.lru_cache(maxsize=64)  # used for every backward of a file
def _divisions(scope: ast.AST) -> list[tuple[str, str]]:
    """Return dividend and divisor of each division in a function or a file."""
    pairs = (_division(node) for node in ast.walk(scope))
    return [(ast.unparse(target), ast.unparse(by)) for target, by in pairs if target is not None and by is not None]


def _names(size: str, divisor: ast.expr) -> bool:
    return bool(size) and _says(size, ast.unparse(divisor))


def _says(size: str, divisor: str) -> bool:
    return bool(size) and re.search(rf"(?<![\w.]){re.escape(size)}(?!\w)", divisor) is not None


def _division(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return None, None
    by_name = node.func.attr in DIVIDES or node.func.attr == "mul_"
    return (node.func.value, node.args[0]) if by_name else (None, None)


class _Flow:
    """Search for a division from a loss back through the names and functions that computed it."""

    def __init__(self, known: LossNormalisation) -> None:
        self.known = known
        self.size = known.size
        self.seen: set[int] = set()
        self.visited: set[tuple[str, int, bool]] = set()

    def divides(self, node: ast.expr, frame: Frame, depth: int, strict: bool = False) -> bool:
        """Whether an expression divides the loss; with ``strict`` (in a loss function), only by the window's size."""
        if id(node) in self.seen or depth > DEEPEST:
            return False
        self.seen.add(id(node))
        for part in ast.walk(node):
            if self._divides_here(part, strict):
                return True
            if isinstance(part, ast.Call) and self._call_divides(part, frame, depth, strict):
                return True
            if isinstance(part, ast.Name) and self._name_divides(part, frame, depth, strict):
                return True
        return False

    def _divides_here(self, node: ast.AST, strict: bool) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
            return self._is_share(node.right, strict)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return not strict and any(_may_be_inverse(side) for side in (node.left, node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            return name in DIVIDES and (not node.args or any(self._is_share(part, strict) for part in node.args))
        return False

    def _is_share(self, divisor: ast.expr, strict: bool) -> bool:
        text = ast.unparse(divisor)
        if _names(self.size, divisor) or ACCUMULATES.search(text):
            return True
        return not strict and not isinstance(divisor, ast.Constant)

    def _call_divides(self, call: ast.Call, frame: Frame, depth: int, strict: bool) -> bool:
        if _sums(call):
            return True
        target = frame.callee(call)
        if target is None:
            return self._unseen(call, frame)
        function, owner = target
        inside = frame.enter(function, call, owner)
        if any(self.divides(value, inside, depth + 1, True) for value in _returned(function)):
            return True
        functions = self.known.functions
        if function not in functions:
            functions[function] = any(self._divides_here(node, True) for node in ast.walk(function.node))
        return functions[function]

    def _unseen(self, call: ast.Call, frame: Frame) -> bool:
        """Whether a function we cannot see may divide by the size: it gets n, or is an unknown method of ``self``."""
        given = [*call.args, *(word.value for word in call.keywords)]
        if any(_names(self.size, part) or ACCUMULATES.search(ast.unparse(part)) for part in given):
            return True
        if any(isinstance(argument, ast.Name) and argument.id == "self" for argument in call.args):
            return True
        func = call.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
            owner = frame.class_of(func.value)
            return owner is None or func.attr not in {name for cls in frame.ancestry(owner) for name in cls.attributes}
        return False

    def _name_divides(self, node: ast.Name, frame: Frame, depth: int, strict: bool) -> bool:
        if depth:
            return self._bindings_divide(node, frame, depth, strict)
        key = (node.id, id(frame))
        names = self.known.names
        if key not in names:
            names[key] = False  # during the search, to end cycles
            names[key] = _Flow(self.known)._bindings_divide(node, frame, 0, strict)
        return names[key]

    def _bindings_divide(self, node: ast.Name, frame: Frame, depth: int, strict: bool) -> bool:
        goes_on = depth < DEEPEST
        if (node.id, id(frame), goes_on) in self.visited:
            return False
        self.visited.add((node.id, id(frame), goes_on))
        for binding, home in _bindings(node, frame):
            statement = binding.node
            if isinstance(statement, ast.AugAssign):
                if isinstance(statement.op, ast.Div | ast.Mult):
                    return True
                if self.divides(statement.value, home, depth + 1, strict):
                    return True
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                value = binding.value if binding.value is not None else statement.value
                if self.divides(value, home, depth + 1, strict):
                    return True
        return False


def _bindings(node: ast.Name, frame: Frame) -> Iterator[tuple[Binding, Frame]]:
    """Yield the assignments of a name in its function, and of the name that the caller passes for it."""
    for function in frame.function.chain():
        if function.holds(node.id):
            for binding in function.bindings.get(node.id, ()):
                yield binding, frame
            break
    caller = frame.caller
    if caller is not None and node.id in frame.arguments and isinstance(frame.arguments[node.id], ast.Name):
        argument = frame.arguments[node.id]
        assert isinstance(argument, ast.Name)
        yield from _bindings(argument, caller)


@functools.lru_cache(maxsize=256)
def _returned(function: FunctionOutline) -> list[ast.expr]:
    returns = (node for node in ast.walk(function.node) if isinstance(node, ast.Return))
    return [node.value for node in returns if node.value is not None]


def _sums(call: ast.Call) -> bool:
    """Whether a loss is a sum and not a mean, so that micro-batches add up correctly."""
    if any(word.arg == "reduction" and isinstance(word.value, ast.Constant) for word in call.keywords):
        reduction = next(word.value for word in call.keywords if word.arg == "reduction")
        return isinstance(reduction, ast.Constant) and reduction.value == "sum"
    return isinstance(call.func, ast.Attribute) and call.func.attr == "sum" and not call.args


def _may_be_inverse(side: ast.expr) -> bool:
    name = dotted_text(side)
    return name is not None and bool(INVERSE.search(name.rpartition(".")[2]))
