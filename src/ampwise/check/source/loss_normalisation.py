"""Follow a loss back from its backward to find whether it is divided by the number of micro-batches."""
# ruff: noqa: SIM905 (long lists of names are read as text)

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampwise.check.source.accumulation import ACCUMULATES, AccumulationWindow
from ampwise.check.source.events import SourceEvent
from ampwise.check.source.frame import Frame
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.names import arguments_given, code_of, dotted_text, last_name, method_called
from ampwise.check.source.outline import Binding, FunctionOutline
from ampwise.check.source.tree_walk import walk

DEEPEST = 6  # names and calls followed back from a backward
MOST = 400  # expressions followed back from a backward
DIVIDES = frozenset(("div", "div_", "true_divide", "divide", "reciprocal"))
MULTIPLIES = frozenset(("mul", "mul_", "multiply"))
# A factor with such a name, of unknown value, may be 1 / n.
INVERSE = LazyPattern(r"accum|(?<!loss_)(?<!loss)scal(e|ing)|norm|inv|factor|ratio|share|frac", re.IGNORECASE)
# A factor with such a name makes a mean a sum, which may be added up over micro-batches.
BATCH_SIZE = LazyPattern(r"batch_?size|^bs$|^batch$", re.IGNORECASE)
# n = nominal batch size / batch size, as in YOLO, whose losses are sums over the batch.
NOMINAL = LazyPattern(r"\bnbs\b|nominal", re.IGNORECASE)
# Functions and methods that keep a factor of what they are given.
LINEAR = frozenset(
    "sum mean stack cat add add_ sub sub_ mul mul_ multiply div div_ divide true_divide neg nan_to_num reduce clone to "
    "float double cuda type_as squeeze view reshape contiguous flatten requires_grad_ values items get pop".split()
)
# Of these, methods whose arguments are shapes, dtypes and keys.
RESHAPES = frozenset(
    "sum mean to type_as squeeze view reshape contiguous flatten requires_grad_ get pop clone reduce".split()
)
LOSS = LazyPattern(r"loss|objective|criterion", re.IGNORECASE)
# Gradients, or buckets of them in a communication hook, and the learning rate.
APPLIED = LazyPattern(r"(^|_)lr($|_)|learning_?rate|^grads?(_|$)|gradients?$|bucket", re.IGNORECASE)
GRADIENTS = frozenset(("grad", "grads", "gradients"))
# Divisors of gradients that are not the number of micro-batches.
OTHER_DIVISOR = LazyPattern(r"world|rank|norm|clip|coef|(^|_)eps|scal", re.IGNORECASE)
SAID_TO_SUM = LazyPattern(r"#.*reduction\W{1,4}sum")  # "NOTE: reduction == sum, there is no normalisation yet"
BUILT_IN = frozenset(("torch", "len", "max", "min", "float", "int"))
MEASURES = frozenset(("sum", "size", "numel", "nelement", "count_nonzero", "norm"))
NUMBERS = LazyPattern(r"\.item\(\)|\.shape\b|\.size\(")  # taken from a loss or its mask
DEVIATIONS = frozenset(("std", "var"))  # what rewards are standardised by, whatever they are of
BOUNDS = frozenset(("clamp", "clamp_min", "clip", "item"))  # a measure, if of one: mask.sum().clamp(min=1)


class Division(NamedTuple):
    """One division: what is divided, and by what."""

    target: ast.expr
    divisor: ast.expr


class LossNormalisation:
    """Whether the losses of an accumulation window may be normalised: divided, summed, or computed out of sight.

    Any division by something other than a literal, or a measure of the micro-batch itself, counts. So does a division
    of the gradients, or of the learning rate by the window's size, anywhere in the file.
    """

    def __init__(self, window: AccumulationWindow) -> None:
        self.window = window
        self.size = code_of(window.size) if window.size is not None else ""
        frame = window.steps[0].frame
        sizes = [value.node for value in frame.values(window.size)] if window.size is not None else []
        self.is_nominal = any(node is not None and NOMINAL.search(code_of(node)) for node in sizes)
        self._known: dict[SourceEvent, bool] = {}
        self._elsewhere: dict[FunctionOutline, bool] = {}
        self.functions: dict[FunctionOutline, bool] = {}  # whether they divide by the size

    def may_be(self, backward: SourceEvent) -> bool:
        """Whether the loss of one backward may be normalised."""
        if backward not in self._known:
            self._known[backward] = self._may_be(backward)
        return self._known[backward]

    def _may_be(self, backward: SourceEvent) -> bool:
        call, frame = backward.node, backward.frame
        if backward.value is None or not isinstance(call, ast.Call) or self.is_nominal:
            return True
        # With weights of its own, as in loss.backward(gradient), anything is possible.
        weighted = call.args not in ([], [backward.value]) or any(word.arg == "gradient" for word in call.keywords)
        if weighted and method_called(call) == "backward" and frame.qualified(call.func) != "torch.autograd.backward":
            return True
        for outer in frame.callers():
            if outer.function not in self._elsewhere:
                self._elsewhere[outer.function] = self._divides_elsewhere(outer.function)
            if self._elsewhere[outer.function]:
                return True
        return _Flow(self).divides(backward.value, frame, 0)

    def _divides_elsewhere(self, function: FunctionOutline) -> bool:
        """Whether gradients, the learning rate or a loss in a container are divided, or the loss is called a sum."""
        for division in _divisions_of_steps(function.outline.script.tree):
            by = code_of(division.divisor)
            if self.is_named_in(by) or (_is_gradient(division.target) and not OTHER_DIVISOR.search(by)):
                return True
        if isinstance(function.node, ast.Module):
            return False
        if SAID_TO_SUM.search(function.text):
            return True
        for division in _divisions(function.node):
            # A plain name is another loss, or one that _Flow follows.
            if isinstance(division.target, ast.Subscript | ast.Attribute):
                text = code_of(division.target)
                if "loss" in text.lower() and not NUMBERS.search(text) and self.says_size(division.divisor):
                    return True
        return False

    def is_named_in(self, text: str) -> bool:
        """Whether a text names the size of the window."""
        return bool(self.size) and re.search(rf"(?<![\w.]){re.escape(self.size)}(?!\w)", text) is not None

    def says_size(self, node: ast.expr) -> bool:
        """Whether an expression names the size of the window, or says that it is about accumulation."""
        return self.is_said_in(code_of(node))

    def is_said_in(self, text: str) -> bool:
        return self.is_named_in(text) or ACCUMULATES.search(text) is not None


@functools.lru_cache(maxsize=64)
def _divisions(scope: ast.AST) -> list[Division]:
    """Return the divisions in a function or a file."""
    found = []
    for node in walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.append(Division(node.left, node.right))
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.Div) or (isinstance(node.op, ast.Mult) and _is_gradient(node.target)):
                found.append(Division(node.target, node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in DIVIDES or node.func.attr == "mul_":
                found.append(Division(node.func.value, node.args[0]))
            elif node.func.attr in ("_foreach_div_", "_foreach_mul_") and len(node.args) > 1:
                found.append(Division(node.args[0], node.args[1]))
    return found


@functools.lru_cache(maxsize=64)
def _divisions_of_steps(tree: ast.AST) -> list[Division]:
    """Return the divisions of gradients, of buckets of them, and of learning rates in a file."""
    return [one for one in _divisions(tree) if _is_gradient(one.target) or _takes_part_in_step(one.target)]


def _is_gradient(node: ast.expr) -> bool:
    """Whether an expression is a gradient, not a number computed from it, such as its norm."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return (isinstance(node, ast.Attribute) and node.attr == "grad") or (
        isinstance(node, ast.Name) and node.id in GRADIENTS
    )


def _takes_part_in_step(node: ast.expr) -> bool:
    for part in walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            name = part.value
        if name and APPLIED.search(name):
            return True
    return False


class _Flow:
    """Search for a division from a loss back through the names and functions that computed it.

    Only what the loss is made of is followed, not the inputs of the model: a division there scales no gradient.
    """

    def __init__(self, known: LossNormalisation) -> None:
        self.known = known
        self.visited: set[tuple[object, int]] = set()
        self.left = MOST

    def divides(self, node: ast.expr, frame: Frame, depth: int, strict: bool = False, is_mean: bool = False) -> bool:
        """Whether an expression divides the loss.

        With ``strict`` (in a loss function), only a division by the window's size counts. ``is_mean``: the expression
        is divided by a measure of the micro-batch, so that a sum in it is no sum in the end.
        """
        self.left -= 1
        if self.left < 0:
            return True  # too much to follow: unknown
        if depth > DEEPEST or (node, id(frame)) in self.visited:
            return False
        self.visited.add((node, id(frame)))
        match node:
            case ast.Name():
                return self._name_divides(node, frame, depth, strict, is_mean)
            case ast.Attribute():
                return self._attribute_divides(node, frame, depth, strict, is_mean)
            case ast.Call():
                return self._call_divides(node, frame, depth, strict, is_mean)
            case ast.BinOp(left, ast.Div() | ast.FloorDiv(), right):
                is_mean = is_mean or self._measures(right, frame)
                return self._is_share(right, frame, strict) or self.divides(left, frame, depth, strict, is_mean)
            case ast.BinOp(left, ast.Mult(), right) if any(
                self._is_inverse(side, frame, strict) for side in (left, right)
            ):
                return True
        return any(self.divides(part, frame, depth, strict, is_mean) for part in _parts(node))

    # -- divisors and factors -----------------------------------------------------------------------------

    def _is_share(self, divisor: ast.expr, frame: Frame, strict: bool) -> bool:
        """Whether a divisor may be the number of micro-batches."""
        if self.known.says_size(divisor):
            return True
        given = frame.arguments.get(divisor.id) if isinstance(divisor, ast.Name) else None
        if given is not None and frame.caller is not None and self.known.says_size(given):
            return True
        if strict or isinstance(divisor, ast.Constant) or self._measures(divisor, frame):
            return False
        values = frame.values(divisor)
        return not all(isinstance(value.node, ast.Constant) for value in values)

    def _measures(self, divisor: ast.expr, frame: Frame) -> bool:
        """Whether a divisor is a measure of the micro-batch: ``mask.sum()``, ``len(x)``, ``x.shape[0]``."""
        if isinstance(divisor, ast.BinOp):  # mask.sum() + 1e-6
            return self._measures(divisor.left, frame) or self._measures(divisor.right, frame)
        pending: list[ast.expr] = [divisor]
        seen: set[ast.expr] = set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, ast.Name):
                pending += [value.node for value in frame.values(node) if value.node is not None]
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOUNDS:
                of_torch = dotted_text(node.func.value) == "torch" and node.args
                pending.append(node.args[0] if of_torch else node.func.value)
                continue
            inner = node
            while isinstance(inner, ast.Subscript | ast.Call | ast.Attribute):
                if isinstance(inner, ast.Attribute) and inner.attr in DEVIATIONS:
                    return True
                is_measure = isinstance(inner, ast.Attribute) and (inner.attr in MEASURES or inner.attr == "shape")
                if is_measure or (isinstance(inner, ast.Call) and dotted_text(inner.func) in ("len", "max", "min")):
                    return self._is_of_micro_batch(node, frame)
                inner = inner.func if isinstance(inner, ast.Call) else inner.value
        return False

    def _is_of_micro_batch(self, node: ast.expr, frame: Frame) -> bool:
        """Whether all names in an expression are bound anew for each micro-batch."""
        loop = self.known.window.loop or self.known.window.region.loop
        if loop is None:
            return True
        if frame is not loop.frame:
            return True  # in a function that is called for each
        names = {part.id for part in walk(node) if isinstance(part, ast.Name)} - BUILT_IN
        return names <= _stored_in(loop.node)

    def _is_inverse(self, factor: ast.expr, frame: Frame, strict: bool) -> bool:
        """Whether a factor may be 1 / n, or makes a mean a sum."""
        if self._measures(factor, frame):
            return True
        if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Div):
            return self._is_share(factor.right, frame, strict)
        name = dotted_text(factor)
        if name is None:
            return False
        if BATCH_SIZE.search(name.rpartition(".")[2]):
            return True
        for value, home in frame.values(factor):
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
                if self._is_share(value.right, home, strict):
                    return True
            elif not isinstance(value, ast.Constant) and not strict and INVERSE.search(name.rpartition(".")[2]):
                return True
        return False

    # -- calls and names ----------------------------------------------------------------------------------

    def _call_divides(self, call: ast.Call, frame: Frame, depth: int, strict: bool, is_mean: bool) -> bool:
        func, method = call.func, method_called(call)
        if method in DIVIDES:
            divisors = call.args[-1:]
            if not divisors or any(self._is_share(part, frame, strict) for part in divisors):
                return True
            is_mean = is_mean or any(self._measures(part, frame) for part in divisors)
        if method in MULTIPLIES and call.args and self._is_inverse(call.args[0], frame, strict):
            return True
        # A sum and not a mean, so that micro-batches add up correctly.
        makers = [(made, home) for made, home in frame.values(func) if made is not func]
        if not is_mean and any(_sums(made, home) for made, home in [(call, frame), *makers]):
            return True
        target = frame.callee(call)
        if target is not None:
            function, owner = target
            inside = frame.enter(function, call, owner)
            if any(self.divides(value, inside, depth + 1, True, is_mean) for value in _returned(function)):
                return True
            functions = self.known.functions
            if function not in functions:
                divisions = _divisions(function.node)
                functions[function] = any(self._is_share(one.divisor, inside, True) for one in divisions)
            return functions[function]
        if self._may_divide_unseen(call, frame):
            return True
        is_linear = (method or last_name(func)) in LINEAR
        followed = [func.value] if is_linear and isinstance(func, ast.Attribute) else []
        adds = is_linear and (method not in RESHAPES or last_name(followed[0]) in ("torch", "dist", "F"))
        followed += [part for part in arguments_given(call) if adds or LOSS.search(last_name(part))]
        return any(self.divides(part, frame, depth, strict, is_mean) for part in followed)

    def _may_divide_unseen(self, call: ast.Call, frame: Frame) -> bool:
        """Whether a function we cannot see may divide by the size: it gets n, or is an unknown method of ``self``."""
        arguments = arguments_given(call)
        put_in = _gathered(frame.function.node)
        loop = self.known.window.loop
        pieces = _stored_in(loop.node) if loop is not None and loop.frame is frame else set()
        named = {id(word.value): word.arg or "" for word in call.keywords}
        for part in arguments:
            names = {name.id for name in walk(part) if isinstance(name, ast.Name)}
            text = ast.unparse(part)
            if any(self.known.says_size(value) for name in names for value in put_in.get(name, ())):
                return True  # batch["weight"] = 1 / n, and model(**batch)
            if names & pieces:  # a micro-batch, or its length, does not tell how many there are
                text = re.sub(rf"(?<![\w.])({'|'.join(names & pieces)})(?!\w)", "_", text)
            elif ACCUMULATES.search(named.get(id(part), "")) or (pieces and text.startswith("len(")):
                return True
            if self.known.is_said_in(text):
                return True
        if any(isinstance(argument, ast.Name) and argument.id == "self" for argument in arguments):
            return True
        if "." in self.known.size:  # it gets the options that n is one of
            options = self.known.size.rpartition(".")[0]
            if options != "self" and any(dotted_text(argument) == options for argument in arguments):
                return True
        func = call.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
            owner = frame.class_of(func.value)
            return owner is None or not any(func.attr in cls.attributes for cls in frame.ancestry(owner))
        return False

    def _name_divides(self, node: ast.Name, frame: Frame, depth: int, strict: bool, is_mean: bool) -> bool:
        function = frame.function.home_of(node.id)
        if function is None or (node.id, id(frame)) in self.visited:
            return False
        self.visited.add((node.id, id(frame)))
        home = next((caller for caller in frame.callers() if caller.function is function), frame)
        bindings = function.bindings.get(node.id, [])
        if function is frame.function:
            earlier = [binding for binding in bindings if getattr(binding.node, "lineno", 0) <= node.lineno]
            bindings = earlier or bindings
        values = [*_values_bound(bindings), *_gathered(function.node).get(node.id, ())]
        if any(self._value_divides(value, home, depth + 1, strict, is_mean) for value in values):
            return True
        if node.id not in function.params:
            return False
        argument = home.arguments.get(node.id)
        if home.caller is not None and argument is not None:
            return self.divides(argument, home.caller, depth + 1, strict, is_mean)
        # A loss that a caller we cannot see computed. It may divide by n, unless this function is the one that knows n.
        # What a constructor gets is no loss: in `loss + beta * kld` it is a weight.
        unseen = home.caller is None and not bindings and function.name != "__init__"
        return unseen and (not self.known.size or len(frame.lookup.paths) > 1)

    def _value_divides(
        self, value: ast.expr | ast.AugAssign, frame: Frame, depth: int, strict: bool, is_mean: bool
    ) -> bool:
        """Whether an assigned value divides, or an augmented assignment does: ``loss /= n``, ``loss *= 1 / n``."""
        if not isinstance(value, ast.AugAssign):
            return self.divides(value, frame, depth, strict, is_mean)
        if isinstance(value.op, ast.Div) and self._is_share(value.value, frame, strict):
            return True
        if isinstance(value.op, ast.Mult) and self._is_inverse(value.value, frame, strict):
            return True
        return self.divides(value.value, frame, depth, strict, is_mean)

    def _attribute_divides(self, node: ast.Attribute, frame: Frame, depth: int, strict: bool, is_mean: bool) -> bool:
        owner = frame.class_of(node.value)
        bindings = frame.attribute_bindings(owner, node.attr) if owner is not None else []
        if not bindings:
            return self.divides(node.value, frame, depth, strict, is_mean)
        for binding in bindings:
            home = frame if binding.function is frame.function else frame.lookup.frame(binding.function, owner)
            values = _values_bound([binding])
            if any(self._value_divides(value, home, depth + 1, strict, is_mean) for value in values):
                return True
        return False


def _parts(node: ast.expr) -> list[ast.expr]:
    """Return the expressions whose values an expression holds, adds or multiplies."""
    match node:
        case ast.Subscript(value) | ast.UnaryOp(_, value) | ast.NamedExpr(_, value) | ast.Starred(value):
            return [value]
        case ast.BinOp(left, _, right) | ast.IfExp(_, left, right):
            return [left, right]
        case ast.Tuple(parts) | ast.List(parts) | ast.BoolOp(_, parts) | ast.Dict(_, parts):
            return parts
        case ast.ListComp(part) | ast.GeneratorExp(part):
            return [part]
    return []


def _sums(call: ast.expr | None, frame: Frame) -> bool:
    """Whether a call sums over its input, or makes a loss that does."""
    if not isinstance(call, ast.Call):
        return False
    reduction = next((word.value for word in call.keywords if word.arg == "reduction"), None)
    if reduction is not None:
        values = [value.node for value in frame.values(reduction)]
        known = [value.value for value in values if isinstance(value, ast.Constant)]
        return not known or "sum" in known
    if method_called(call) != "sum":
        return False
    of_torch = isinstance(call.func, ast.Attribute) and dotted_text(call.func.value) == "torch"
    return len(call.args) == of_torch and not call.keywords


def _values_bound(bindings: list[Binding]) -> Iterator[ast.expr | ast.AugAssign]:
    """Yield the values of assignments; an augmented assignment as a whole."""
    for binding in bindings:
        statement = binding.node
        if isinstance(statement, ast.AugAssign):
            yield statement
        elif isinstance(statement, ast.For | ast.AsyncFor):
            yield statement.iter
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            yield binding.value if binding.value is not None else statement.value


@functools.lru_cache(maxsize=64)
def _gathered(function: ast.AST) -> dict[str, list[ast.expr]]:
    """Return what a function puts into each list or dictionary: ``losses.append(loss)``, ``losses["a"] = loss``."""
    found: dict[str, list[ast.expr]] = {}
    for node in walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("append", "add_") and isinstance(node.func.value, ast.Name):
                found.setdefault(node.func.value.id, []).append(node.args[0])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    found.setdefault(target.value.id, []).append(node.value)
    return found


@functools.lru_cache(maxsize=16)
def _stored_in(loop: ast.AST) -> set[str]:
    return {part.id for part in walk(loop) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


@functools.lru_cache(maxsize=256)
def _returned(function: FunctionOutline) -> list[ast.expr]:
    returns = [node for node in walk(function.node) if isinstance(node, ast.Return)]
    return [node.value for node in returns if node.value is not None]
