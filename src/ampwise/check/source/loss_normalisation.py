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
from ampwise.check.source.names import arguments_given, dotted_text, method_called
from ampwise.check.source.outline import Binding, FunctionOutline

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
        call, frame = backward.node, backward.frame
        if backward.value is None or not isinstance(call, ast.Call):
            return True
        # With weights of its own, as in loss.backward(gradient), anything is possible.
        if call.args or any(word.arg == "gradient" for word in call.keywords):
            return True
        if frame not in self._elsewhere:
            self._elsewhere[frame] = self._divides_elsewhere(frame)
        if backward not in self._known:
            self._known[backward] = self._elsewhere[frame] or _Flow(self).divides(backward.value, frame, 0)
        return self._known[backward]

    def _divides_elsewhere(self, frame: Frame) -> bool:
        """Whether gradients, the learning rate or a loss in a container (``losses["a"] /= n``) are divided."""
        for target, divisor in _divisions(frame.outline.script.tree):
            if GRADIENTS.search(target) or (LEARNING_RATE.search(target) and self.is_named_in(divisor)):
                return True
        around = [caller.function.node for caller in frame.callers()]
        for function in [node for node in around if not isinstance(node, ast.Module)]:
            for target, divisor in _divisions(function):
                # A plain name is another loss, or one that _Flow follows.
                is_kept = "loss" in target.lower() and ".item()" not in target and not target.isidentifier()
                if is_kept and self.is_named_in(divisor):
                    return True
        return False

    def is_named_in(self, divisor: str) -> bool:
        """Whether a divisor names the size of the window."""
        return bool(self.size) and re.search(rf"(?<![\w.]){re.escape(self.size)}(?!\w)", divisor) is not None


@functools.lru_cache(maxsize=64)  # used for every backward of a file
def _divisions(scope: ast.AST) -> list[tuple[str, str]]:
    """Return dividend and divisor of each division in a function or a file."""
    found = []
    for node in ast.walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.append((ast.unparse(node.left), ast.unparse(node.right)))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            found.append((ast.unparse(node.target), ast.unparse(node.value)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            divides = node.func.attr in DIVIDES or node.func.attr == "mul_"
            found += [(ast.unparse(node.func.value), ast.unparse(node.args[0]))] if divides else []
    return found


class _Flow:
    """Search for a division from a loss back through the names and functions that computed it."""

    def __init__(self, known: LossNormalisation) -> None:
        self.known = known
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
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and not strict:
            names = [dotted_text(side) for side in (node.left, node.right)]
            return any(name is not None and INVERSE.search(name.rpartition(".")[2]) for name in names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DIVIDES:
            return not node.args or any(self._is_share(part, strict) for part in node.args)
        return False

    def _is_share(self, divisor: ast.expr, strict: bool) -> bool:
        return self._says_size(divisor) or (not strict and not isinstance(divisor, ast.Constant))

    def _says_size(self, node: ast.expr) -> bool:
        text = ast.unparse(node)
        return self.known.is_named_in(text) or ACCUMULATES.search(text) is not None

    def _call_divides(self, call: ast.Call, frame: Frame, depth: int, strict: bool) -> bool:
        # A sum and not a mean, so that micro-batches add up correctly.
        reduction = next((word.value for word in call.keywords if word.arg == "reduction"), None)
        if isinstance(reduction, ast.Constant):
            sums = reduction.value == "sum"
        else:
            sums = method_called(call) == "sum" and not call.args
        if sums:
            return True
        target = frame.callee(call)
        if target is None:
            return self._may_divide_unseen(call, frame)
        function, owner = target
        inside = frame.enter(function, call, owner)
        if any(self.divides(value, inside, depth + 1, True) for value in _returned(function)):
            return True
        functions = self.known.functions
        if function not in functions:
            functions[function] = any(self._divides_here(node, True) for node in ast.walk(function.node))
        return functions[function]

    def _may_divide_unseen(self, call: ast.Call, frame: Frame) -> bool:
        """Whether a function we cannot see may divide by the size: it gets n, or is an unknown method of ``self``."""
        if any(self._says_size(part) for part in arguments_given(call)):
            return True
        if any(isinstance(argument, ast.Name) and argument.id == "self" for argument in call.args):
            return True
        func = call.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
            owner = frame.class_of(func.value)
            return owner is None or not any(func.attr in cls.attributes for cls in frame.ancestry(owner))
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
        visit = (node.id, id(frame), depth < DEEPEST)
        if visit in self.visited:
            return False
        self.visited.add(visit)
        for binding, home in _bindings(node, frame):
            statement = binding.node
            value = None
            if isinstance(statement, ast.AugAssign):
                if isinstance(statement.op, ast.Div | ast.Mult):
                    return True
                value = statement.value
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                value = binding.value if binding.value is not None else statement.value
            if value is not None and self.divides(value, home, depth + 1, strict):
                return True
        return False


def _bindings(node: ast.Name, frame: Frame) -> Iterator[tuple[Binding, Frame]]:
    """Yield the assignments of a name in its function, and of the name that the caller passes for it."""
    function = frame.function.home_of(node.id)
    for binding in function.bindings.get(node.id, ()) if function is not None else ():
        yield binding, frame
    argument = frame.arguments.get(node.id)
    if frame.caller is not None and isinstance(argument, ast.Name):
        yield from _bindings(argument, frame.caller)


@functools.lru_cache(maxsize=256)
def _returned(function: FunctionOutline) -> list[ast.expr]:
    returns = [node for node in ast.walk(function.node) if isinstance(node, ast.Return)]
    return [node.value for node in returns if node.value is not None]
