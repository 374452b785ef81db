"""What an expression may be, and under which conditions: ``torch.bfloat16`` where ``args.dtype == "bf16"`` holds.

``Frame.values`` lists the values of a name without their conditions. Here each value comes with the options of the
script that lead to it, so that two places of a script can be asked whether they happen in the same run. Names are
followed through assignments, the ``if``s around them, conditional expressions, dictionaries and functions of the
script. A literal that is an option (a constant at the top of the file, a field) stays open: it is there to be changed.
"""

from __future__ import annotations

import ast
import bisect
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampwise.check.source.frame import Frame, once_per_argument
from ampwise.check.source.names import code_of, dotted_text
from ampwise.check.source.outline import Binding, ClassOutline, FileOutline, FunctionOutline
from ampwise.check.source.torch_names import AUTOCASTS, DTYPES, GRAD_SCALERS, SPELLINGS

MOST_CASES = 24  # an expression with more is treated as unknown
DEEPEST = 8  # calls followed into functions
BLOCKS = ("body", "orelse", "finalbody")
JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SAME_TEXT = frozenset(("lower", "upper", "strip", "casefold"))
FALSE = frozenset((False, None, ""))
HALF_AND_FULL = frozenset(("float16", "bfloat16", "float32"))  # what `getattr(torch, name)` is asked for


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype; it equals no string."""

    name: str


@dataclass(frozen=True, slots=True)
class Known:
    """Literal or dtype."""

    value: Any


@dataclass(frozen=True, slots=True)
class Option:
    """Value that is not known: an argument of the script, a field of its configuration, a question to the hardware."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Object that an expression makes or refers to, in the frame that evaluates it."""

    node: ast.expr
    frame: Frame


class Limit(NamedTuple):
    """What an option must be: one of some values, or none of them."""

    among: frozenset[Any] | None = None
    without: frozenset[Any] = frozenset()

    def both(self, other: Limit) -> Limit | None:
        """Return the limit that holds if both do; None if they contradict each other."""
        without = self.without | other.without
        if self.among is None and other.among is None:
            return Limit(None, without)
        among = self.among if other.among is None else other.among
        if self.among is not None and other.among is not None:
            among = self.among & other.among
        left = (among or frozenset()) - without
        return Limit(left) if left else None


Conditions = dict[str, Limit]  # by the name of an option
Value = Known | Option | Made
ALWAYS: Conditions = {}


class Case(NamedTuple):
    """One value of an expression, and when it has it."""

    value: Value
    given: Conditions


class Guard(NamedTuple):
    """Condition around a statement; a string is one of its own, such as whether a ``try`` failed."""

    test: ast.expr | str
    holds: bool
    leaves: bool = False  # because the other side has left the block: it comes to nothing that follows


def joined(*all_of: Conditions) -> Conditions | None:
    """Return conditions that hold together; None if they never do."""
    found: Conditions = {}
    for conditions in all_of:
        if not found:
            found = dict(conditions)
            continue
        for name, limit in conditions.items():
            both = limit.both(found[name]) if name in found else limit
            if both is None:
                return None
            found[name] = both
    return found


def denies(conditions: Conditions, dtype: str) -> bool:
    """Whether an option must be something else than this dtype by name: not ``args.dtype == "float16"``."""
    without = [value for limit in conditions.values() for value in limit.without if isinstance(value, str)]
    return any(SPELLINGS.get(value.lower()) == dtype for value in without)


def switched_on(given: Conditions) -> list[str]:
    """Return the options that must be true."""
    return [name for name, limit in given.items() if limit.among is None and limit.without >= FALSE]


def combined(first: Iterable[Conditions], second: Iterable[Conditions]) -> list[Conditions]:
    """Return every way in which one of the first and one of the second hold together."""
    others = list(second)
    found = [both for one in first for other in others if (both := joined(one, other)) is not None]
    return found if len(found) <= MOST_CASES else [ALWAYS]


@once_per_argument
def _cases(frame: Frame, node: ast.expr) -> list[Case] | None:
    found = list(_find_cases(frame, node))
    return found if len(found) <= MOST_CASES else None


def cases_of(frame: Frame, node: ast.expr) -> list[Case]:
    """Return what an expression may be, each with its conditions."""
    found = _cases(frame, node)
    return [Case(Option(code_of(node)), ALWAYS)] if found is None else found


def truth_of(frame: Frame, test: ast.expr) -> tuple[list[Conditions], list[Conditions]]:
    """Return the conditions under which a test holds, and those under which it does not."""
    holds: list[Conditions] = []
    fails: list[Conditions] = []
    for case in cases_of(frame, test):
        yes, no = _truth(case)
        holds += yes
        fails += no
    return holds, fails


def _truth(case: Case) -> tuple[list[Conditions], list[Conditions]]:
    value = case.value
    if isinstance(value, Known):
        return ([case.given], []) if value.value else ([], [case.given])
    if isinstance(value, Made):
        if _is_object(value):
            return [case.given], []
        value = Option(code_of(value.node))
    holds = joined(case.given, {value.name: Limit(without=FALSE)})
    fails = joined(case.given, {value.name: Limit(FALSE)})
    return ([] if holds is None else [holds]), ([] if fails is None else [fails])


def _is_object(made: Made) -> bool:
    """Whether it is surely an object, which is neither false nor a literal; other calls and names may be anything."""
    if isinstance(made.node, ast.Name):
        return made.frame.outline.imports.qualified(made.node) in (*AUTOCASTS, *GRAD_SCALERS)
    if not isinstance(made.node, ast.Call):
        return isinstance(made.node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Lambda)
    name = made.frame.qualified(made.node.func) or dotted_text(made.node.func) or ""
    return name in GRAD_SCALERS or name.rpartition(".")[2][:1].isupper() or name.endswith("autocast")


# -- conditions around a statement ----------------------------------------------------------------------------


def conditions_at(frame: Frame, node: ast.stmt | ast.expr, callers: bool = True) -> list[Conditions]:
    """Return the ways in which a statement is reached, from the start of the program as far as it was followed."""
    found = _held(frame, guards_around(node, frame.function))
    if callers and frame.caller is not None and frame.call is not None:
        found = combined(conditions_at(frame.caller, frame.call), found)
    return found


def _held(frame: Frame, guards: tuple[Guard, ...]) -> list[Conditions]:
    found = [ALWAYS]
    for guard in guards:
        found = combined(found, _sides(frame, guard)[0])
    return found


def _sides(frame: Frame, guard: Guard) -> tuple[list[Conditions], list[Conditions]]:
    """Return the conditions of being inside of a guard, and outside."""
    if isinstance(guard.test, str):
        sides = [{guard.test: Limit(without=FALSE)}], [{guard.test: Limit(FALSE)}]
    else:
        sides = truth_of(frame, guard.test)
    return sides if guard.holds else sides[::-1]


def guards_around(node: ast.stmt | ast.expr, function: FunctionOutline) -> tuple[Guard, ...]:
    """Return the conditions around a node within its function, the outermost first."""
    starts, guards = _guards_by_position(function)
    index = bisect.bisect_right(starts, (node.lineno, node.col_offset)) - 1
    return guards[index] if index >= 0 else ()


@functools.lru_cache(maxsize=256)
def _guards_by_position(function: FunctionOutline) -> tuple[list[tuple[int, int]], list[tuple[Guard, ...]]]:
    found: list[tuple[tuple[int, int], tuple[Guard, ...]]] = []
    pending: list[tuple[list[ast.stmt], tuple[Guard, ...]]] = [(function.body, ())]
    for body, around in pending:
        held = around
        for statement in body:
            found.append(((statement.lineno, statement.col_offset), held))
            if isinstance(statement, NESTED):
                continue
            if isinstance(statement, ast.If):
                pending.append((statement.body, (*held, Guard(statement.test, True))))
                pending.append((statement.orelse, (*held, Guard(statement.test, False))))
                held = (*held, *_after(statement))
            elif isinstance(statement, ast.Try) and statement.handlers:
                failed = f"an exception in line {statement.lineno}"
                pending.append(([*statement.body, *statement.orelse], (*held, Guard(failed, False))))
                pending += [(handler.body, (*held, Guard(failed, True))) for handler in statement.handlers]
                pending.append((statement.finalbody, held))
            elif isinstance(statement, ast.Match):
                before: tuple[Guard, ...] = ()
                for case in statement.cases:
                    test = _pattern_test(statement.subject, case.pattern)
                    pending.append((case.body, (*held, *before, *([Guard(test, True)] if test is not None else []))))
                    before = (*before, *([Guard(test, False)] if test is not None else []))
            elif isinstance(statement, ast.Assert):
                held = (*held, Guard(statement.test, True, leaves=True))
            else:
                pending += [(getattr(statement, name, []), held) for name in BLOCKS if hasattr(statement, name)]
    found.sort(key=lambda item: item[0])
    return [position for position, _ in found], [guards for _, guards in found]


def _after(statement: ast.If) -> list[Guard]:
    """Return what holds after an ``if`` because the other side has left."""
    if isinstance(statement.body[-1], JUMPS):
        further = statement.orelse[-1] if statement.orelse else None
        return [Guard(statement.test, False, leaves=True), *(_after(further) if isinstance(further, ast.If) else ())]
    if statement.orelse and isinstance(statement.orelse[-1], JUMPS):
        return [Guard(statement.test, True, leaves=True)]
    return []


def _pattern_test(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    """Return ``subject in (...)`` for the literals of a ``case``; None for one that always matches."""
    options = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    literals = [option.value for option in options if isinstance(option, ast.MatchValue)]
    if len(literals) != len(options):
        return None
    test = ast.Compare(subject, [ast.In()], [ast.Tuple(literals, ast.Load())])
    return ast.copy_location(test, subject)


# -- expressions ----------------------------------------------------------------------------------------------


def _find_cases(frame: Frame, node: ast.expr) -> Iterator[Case]:
    if isinstance(node, ast.Constant):
        yield Case(Known(node.value), ALWAYS)
    elif isinstance(node, ast.Name):
        yield from _cases_of_name(frame, node)
    elif isinstance(node, ast.Attribute):
        yield from _cases_of_attribute(frame, node)
    elif isinstance(node, ast.IfExp):
        holds, fails = truth_of(frame, node.test)
        yield from _where(cases_of(frame, node.body), holds)
        yield from _where(cases_of(frame, node.orelse), fails)
    elif isinstance(node, ast.BoolOp):
        yield from _cases_of_operator(frame, node.values, isinstance(node.op, ast.Or))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        holds, fails = truth_of(frame, node.operand)
        yield from [Case(Known(False), given) for given in holds]
        yield from [Case(Known(True), given) for given in fails]
    elif isinstance(node, ast.Compare):
        yield from _cases_of_comparison(frame, node)
    elif isinstance(node, ast.Subscript):
        yield from _looked_up(frame, node.value, node.slice, None, node)
    elif isinstance(node, ast.Call):
        yield from _cases_of_call(frame, node)
    elif isinstance(node, ast.NamedExpr):
        yield from cases_of(frame, node.value)
    elif isinstance(node, ast.BinOp | ast.JoinedStr | ast.UnaryOp):
        yield Case(Option(code_of(node)), ALWAYS)
    else:
        yield Case(Made(node, frame), ALWAYS)


def _where(cases: Iterable[Case], conditions: Iterable[Conditions]) -> list[Case]:
    """Return cases under further conditions, without those that cannot be."""
    ways = list(conditions)
    found = [(case.value, joined(case.given, given)) for case in cases for given in ways]
    return [Case(value, given) for value, given in found if given is not None]


def _cases_of_operator(frame: Frame, parts: list[ast.expr], is_or: bool) -> Iterator[Case]:
    open_: list[Conditions] = [ALWAYS]  # where the parts so far have not decided
    for part in parts[:-1]:
        undecided: list[Conditions] = []
        for case in _where(cases_of(frame, part), open_):
            holds, fails = _truth(case)
            decided = holds if is_or else fails
            # What it decides for is the value itself, or True and False where only that is known.
            value = case.value if isinstance(case.value, Known | Made) else Known(is_or)
            yield from [Case(value, given) for given in decided]
            undecided += fails if is_or else holds
        open_ = undecided
    yield from _where(cases_of(frame, parts[-1]), open_)


def _cases_of_comparison(frame: Frame, node: ast.Compare) -> Iterator[Case]:
    operator, right = node.ops[0], node.comparators[0]
    is_membership = isinstance(operator, ast.In | ast.NotIn)
    if len(node.ops) > 1 or not (is_membership or isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot)):
        yield Case(Option(code_of(node)), ALWAYS)
        return
    equal = isinstance(operator, ast.Eq | ast.Is | ast.In)
    if isinstance(node.left, ast.Name) and node.left.id == "__name__":
        yield Case(Known(equal), ALWAYS)
        return
    for left in cases_of(frame, node.left):
        if is_membership:
            sets = [(_members(frame, right), ALWAYS)]
        else:
            others = cases_of(frame, right)
            options = [case for case in others if isinstance(case.value, Option)]
            if options and isinstance(left.value, Known):  # "bf16" == args.dtype
                yield from _limited(frame, options[0], frozenset([left.value.value]), equal)
                continue
            sets = [
                (frozenset([case.value.value]) if isinstance(case.value, Known) else None, case.given)
                for case in others
            ]
        for members, given in sets:
            both = joined(left.given, given)
            if both is None:
                continue
            if members is None:
                name = f"{_name_of(frame, node.left)} is {_name_of(frame, right)}"
                yield Case(Known(equal), {**both, name: Limit(without=FALSE)})
                yield Case(Known(not equal), {**both, name: Limit(FALSE)})
            else:
                yield from _limited(frame, Case(left.value, both), members, equal)


def _limited(frame: Frame, case: Case, members: frozenset[Any], equal: bool) -> Iterator[Case]:
    """Yield whether a value is one of the members."""
    value = case.value
    if isinstance(value, Made) and not _is_object(value):
        value = Option(code_of(value.node))
    if isinstance(value, Known):
        yield Case(Known((value.value in members) == equal), case.given)
    elif isinstance(value, Option):
        choices = choices_of(frame.outline).get(value.name.rpartition(".")[2])
        if choices and all(isinstance(member, str) for member in members):
            members &= choices
            if not members:
                yield Case(Known(not equal), case.given)
                return
        inside = joined(case.given, {value.name: Limit(members)})
        outside = joined(case.given, {value.name: Limit(without=members)})
        yield from [Case(Known(equal), given) for given in (inside,) if given is not None]
        yield from [Case(Known(not equal), given) for given in (outside,) if given is not None]
    else:
        yield Case(Known(not equal), case.given)  # an object is neither None nor a literal


def _members(frame: Frame, node: ast.expr) -> frozenset[Any] | None:
    """Return the literals of a list, tuple or set; None if one is unknown."""
    for case in cases_of(frame, node):
        held = case.value.node if isinstance(case.value, Made) else None
        if isinstance(held, ast.Dict):
            parts = [key for key in held.keys if key is not None]
        elif isinstance(held, ast.List | ast.Tuple | ast.Set):
            parts = held.elts
        else:
            return None
        values = [single.value for part in parts if (single := _single(frame, part)) is not None]
        plain = [value.value for value in values if isinstance(value, Known)]
        return frozenset(plain) if len(plain) == len(parts) else None
    return None


def _single(frame: Frame, node: ast.expr) -> Case | None:
    found = cases_of(frame, node)
    return found[0] if len(found) == 1 else None


def _looked_up(
    frame: Frame, holder: ast.expr, key: ast.expr, default: ast.expr | None, whole: ast.expr
) -> Iterator[Case]:
    """Yield the cases of ``{"bf16": torch.bfloat16}[key]``; of another holder, an option named after its key."""
    for held in cases_of(frame, holder):
        table = as_display(held.value.node) if isinstance(held.value, Made) else None
        home = held.value.frame if isinstance(held.value, Made) else frame
        if isinstance(table, ast.Dict):
            yield from _where(_entries(frame, key, table, home, default), [held.given])
        elif isinstance(table, ast.Tuple | ast.List) and isinstance(key, ast.Constant) and isinstance(key.value, int):
            if -len(table.elts) <= key.value < len(table.elts):
                yield from _where(cases_of(home, table.elts[key.value]), [held.given])
        else:
            yield Case(Option(f"{_name_of(frame, holder)}[{code_of(key)}]"), held.given)


def as_display(node: ast.expr) -> ast.expr:
    """Return ``{"a": 1}`` for ``dict(a=1)``."""
    if not isinstance(node, ast.Call) or dotted_text(node.func) != "dict" or node.args:
        return node
    if not all(word.arg for word in node.keywords):
        return node
    return ast.Dict([ast.Constant(word.arg) for word in node.keywords], [word.value for word in node.keywords])


def _entries(frame: Frame, key: ast.expr, table: ast.Dict, home: Frame, default: ast.expr | None) -> Iterator[Case]:
    literals = [name.value if isinstance(name, ast.Constant) else None for name in table.keys]
    for case in cases_of(frame, key):
        if isinstance(case.value, Known):
            wanted = case.value.value
            index = literals.index(wanted) if wanted in literals else None
            if index is not None:
                yield from _where(cases_of(home, table.values[index]), [case.given])
            elif default is not None:
                yield from _where(cases_of(frame, default), [case.given])
            continue
        name = case.value.name if isinstance(case.value, Option) else code_of(key)
        choices = choices_of(frame.outline).get(name.rpartition(".")[2])
        for literal, value in zip(literals, table.values, strict=True):
            if choices and isinstance(literal, str) and literal not in choices:
                continue
            given = joined(case.given, {name: Limit(frozenset([literal]))})
            yield from _where(cases_of(home, value), [given] if given is not None else [])
        if default is not None:
            given = joined(case.given, {name: Limit(without=frozenset(literals))})
            yield from _where(cases_of(frame, default), [given] if given is not None else [])


def _cases_of_call(frame: Frame, node: ast.Call) -> Iterator[Case]:
    func, args = node.func, node.args
    name = dotted_text(func) or ""
    if name == "getattr" and len(args) >= 2:
        yield from _cases_of_getattr(frame, node)
        return
    if name in ("bool", "str") and len(args) == 1:
        inner = cases_of(frame, args[0])
        yield from inner if not any(isinstance(case.value, Known) for case in inner) or name == "bool" else _text(inner)
        return
    if isinstance(func, ast.Attribute) and func.attr in SAME_TEXT and not args:
        yield from _lowered(cases_of(frame, func.value), func.attr)
        return
    if isinstance(func, ast.Attribute) and func.attr == "get" and 1 <= len(args) <= 2:
        yield from _looked_up(frame, func.value, args[0], args[1] if len(args) == 2 else None, node)
        return
    if isinstance(func, ast.Attribute) and func.attr == "is_enabled" and not args:
        for case in cases_of(frame, func.value):
            yield from _where(_enabled(case.value) or [Case(Option(code_of(node)), ALWAYS)], [case.given])
        return
    target = frame.callee(node)
    if (
        target is not None
        and not isinstance(target[0].node, ast.Module)
        and target[0].name != "__init__"
        and len(frame.callers()) < DEEPEST
        and not any(outer.function is target[0] for outer in frame.callers())
    ):
        yield from _returned(frame.enter(target[0], node, target[1]))
        return
    yield Case(Made(node, frame), ALWAYS)


def _enabled(scaler: Value) -> list[Case]:
    """Return what ``scaler.is_enabled()`` is; nothing if it is not a GradScaler that the script makes."""
    if not isinstance(scaler, Made) or not isinstance(scaler.node, ast.Call):
        return []
    made, home = scaler.node, scaler.frame
    if home.qualified(made.func) not in GRAD_SCALERS:
        return []
    asked = next((word.value for word in made.keywords if word.arg == "enabled"), ast.Constant(True))
    return list(cases_of(home, asked))


def results_of_closure(made: Made, call: ast.Call) -> list[tuple[ast.expr, Frame]]:
    """Return what a call of a lambda, or of a function made inside the one that returned it, returns."""
    node, home = made.node, made.frame
    if isinstance(node, ast.Lambda):
        return [(node.body, home)]
    inner = home.function.functions.get(node.id) if isinstance(node, ast.Name) else None
    return [(value, home.enter(inner, call, None)) for value in inner.returns if value is not None] if inner else []


def _text(cases: list[Case]) -> list[Case]:
    """Return the cases of ``str(dtype)``: a literal stays, a dtype becomes its name."""
    return [
        Case(Known(f"torch.{case.value.value.name}"), case.given)
        if isinstance(case.value, Known) and isinstance(case.value.value, Dtype)
        else case
        for case in cases
    ]


def _lowered(cases: list[Case], method: str) -> list[Case]:
    return [
        Case(Known(getattr(case.value.value, method)()), case.given)
        if isinstance(case.value, Known) and isinstance(case.value.value, str)
        else case
        for case in cases
    ]


def _cases_of_getattr(frame: Frame, node: ast.Call) -> Iterator[Case]:
    """Yield the cases of ``getattr(torch, name)`` and of ``getattr(args, "fp16", False)``."""
    holder, key = node.args[:2]
    if frame.qualified(holder) == "torch":
        for case in cases_of(frame, key):
            if isinstance(case.value, Known):
                dtype = DTYPES.get(f"torch.{case.value.value}")
                yield Case(Known(Dtype(dtype)) if dtype else Option(code_of(node)), case.given)
            elif isinstance(case.value, Option):
                option = case.value.name
                choices = choices_of(frame.outline).get(option.rpartition(".")[2]) or _dtypes_named(frame.outline)
                for choice in sorted(choices):
                    given = joined(case.given, {option: Limit(frozenset([choice]))})
                    dtype = DTYPES.get(f"torch.{choice}")
                    if given is not None and dtype is not None:
                        yield Case(Known(Dtype(dtype)), given)
            else:
                yield Case(Option(code_of(node)), case.given)
    elif isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(holder, ast.Name | ast.Attribute):
        attribute = ast.copy_location(ast.Attribute(holder, key.value, ast.Load()), node)
        yield from _cases_of_attribute(frame, attribute)
    else:
        yield Case(Option(code_of(node)), ALWAYS)


def _returned(inside: Frame) -> Iterator[Case]:
    """Yield what a function of the script returns; a context manager made by ``yield`` is what it enters around it."""
    function = inside.function
    for statement in sorted(_own_statements(function), key=lambda each: each.lineno):
        ways = _held(inside, guards_around(statement, function))
        if isinstance(statement, ast.Return):
            value = statement.value
            yield from _where(cases_of(inside, value) if value is not None else [Case(Known(None), ALWAYS)], ways)
        elif isinstance(statement, ast.With) and _yields(statement):
            yield from _where(cases_of(inside, statement.items[-1].context_expr), ways)


def _yields(statement: ast.With) -> bool:
    return any(
        isinstance(part, ast.Expr) and isinstance(part.value, ast.Yield) and part.value.value is None
        for part in statement.body
    )


@functools.lru_cache(maxsize=256)
def _own_statements(function: FunctionOutline) -> list[ast.stmt]:
    """Return the ``return`` and ``with`` statements of a function, without those of functions inside it."""
    found: list[ast.stmt] = []
    pending: list[ast.AST] = [*function.body]
    for node in pending:
        if isinstance(node, NESTED):
            continue
        if isinstance(node, ast.Return | ast.With):
            found.append(node)
        blocks = ast.stmt | ast.ExceptHandler | ast.match_case
        pending.extend([child for child in ast.iter_child_nodes(node) if isinstance(child, blocks)])
    return found


# -- names ----------------------------------------------------------------------------------------------------


def _name_of(frame: Frame, node: ast.expr) -> str:
    """Return the name of an option, the same under its aliases: ``self.args`` is ``args``."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        options = {case.value.name for case in cases_of(frame, node) if isinstance(case.value, Option)}
        if len(options) == 1:
            return next(iter(options))
    return code_of(node)


def _cases_of_name(frame: Frame, node: ast.Name) -> Iterable[Case]:
    name = node.id
    function = frame.function.home_of(name)
    if function is None:
        qualified = frame.outline.imports.qualified(node)
        if qualified in DTYPES:
            return [Case(Known(Dtype(DTYPES[qualified])), ALWAYS)]
        return [Case(Made(node, frame) if qualified or frame.definition(node) else Option(name), ALWAYS)]
    home = next((outer for outer in frame.callers() if outer.function is function), None)
    home = home or frame.lookup.frame(function, frame.instance_of)
    found: list[Case] = []
    if name in function.params:
        found = _cases_of_parameter(home, name)
    elif function.parent is None and frame.outline.imports.qualified(node) is not None:
        found = [Case(Made(node, frame), ALWAYS)]  # try: from torch.amp import autocast; except: autocast = None
    bindings = function.bindings.get(name, [])
    if function is frame.function:  # only what is assigned before, unless all of it is further down, in a loop
        before = [binding for binding in bindings if _end(binding) < node.lineno]
        bindings = before if before or found else bindings
    is_constant = len(function.bindings.get(name, ())) == 1 and not found
    return _assigned(home, function, bindings, found, name, is_constant)


def _end(binding: Binding) -> int:
    node = binding.node
    line = node.lineno if isinstance(node, ast.With | ast.For | ast.AsyncWith | ast.AsyncFor) else None
    return line or getattr(node, "end_lineno", None) or 0


def _assigned(
    home: Frame,
    function: FunctionOutline,
    bindings: list[Binding],
    found: list[Case],
    name: str,
    is_constant: bool,
) -> list[Case]:
    """Return the cases of a name after assignments: a later one replaces the earlier ones where it is reached."""
    for binding in bindings:
        where = home if binding.function is home.function else home.lookup.frame(binding.function, home.instance_of)
        guards = guards_around(binding.node, binding.function)  # type: ignore[arg-type]
        made = _cases_of_binding(where, binding, name)
        if is_constant and isinstance(binding.value, ast.Constant) and not guards:
            literal = binding.value.value
            at_top = isinstance(function.node, ast.Module)
            is_off = literal is False and not at_top and "." not in name  # in its own function: use_amp = False
            if (isinstance(literal, bool) and not is_off) or (at_top and isinstance(literal, str)):
                made = [Case(Option(name), ALWAYS)]  # a constant, which is there to be changed
        if not guards:
            found = made
            continue
        if all(guard.leaves for guard in guards):
            found = _where(made, _held(where, guards))
            continue
        inside = _held(where, guards)
        outside: list[Conditions] = []
        so_far = [ALWAYS]
        for guard in guards:
            holds, fails = _sides(where, guard)
            outside += [] if guard.leaves else combined(so_far, fails)
            so_far = combined(so_far, holds)
        found = [*_where(found, outside), *_where(made, inside)]
        if len(found) > MOST_CASES:
            return [Case(Option(name), ALWAYS)]
    return found or [Case(Option(name), ALWAYS)]


def _cases_of_binding(where: Frame, binding: Binding, name: str) -> list[Case]:
    if binding.value is not None:
        return cases_of(where, binding.value)
    # model, optimizer, scaler = build(args)
    node = binding.node
    targets = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(targets, ast.Tuple) and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        texts = [dotted_text(target) for target in targets.elts]
        if name in texts:
            index = texts.index(name)
            found: list[Case] = []
            for case in cases_of(where, node.value):
                held = case.value.node if isinstance(case.value, Made) else None
                if not isinstance(held, ast.Tuple) or len(held.elts) != len(texts) or not isinstance(case.value, Made):
                    return [Case(Option(name), ALWAYS)]
                found += _where(cases_of(case.value.frame, held.elts[index]), [case.given])
            return found or [Case(Option(name), ALWAYS)]
    return [Case(Option(name), ALWAYS)]


def _cases_of_parameter(home: Frame, name: str) -> list[Case]:
    if name in home.arguments and home.caller is not None:
        return list(cases_of(home.caller, home.arguments[name]))
    default = home.function.defaults.get(name)
    call = home.call
    is_open = call is None or any(isinstance(argument, ast.Starred) for argument in call.args)
    if call is not None and default is not None and not is_open and all(word.arg for word in call.keywords):
        return list(cases_of(home, default))
    return [Case(Option(name), ALWAYS)]


def _cases_of_attribute(frame: Frame, node: ast.Attribute) -> Iterable[Case]:
    qualified = frame.qualified(node) if frame.outline.imports.qualified(node) else None
    if qualified in DTYPES:
        return [Case(Known(Dtype(DTYPES[qualified])), ALWAYS)]
    if qualified is not None:
        return [Case(Made(node, frame), ALWAYS)]
    owner = frame.class_of_settings(node.value)
    is_self = isinstance(node.value, ast.Name) and any(
        function.self_name == node.value.id for function in frame.function.scopes if function.owner is not None
    )
    name = f"self.{node.attr}" if is_self else f"{_name_of(frame, node.value)}.{node.attr}"
    if owner is not None:
        return _cases_of_own_attribute(frame, owner, node, name)
    if isinstance(node.value, ast.Name):
        home = frame.function.home_of(node.value.id)
        bindings = home.bindings.get(f"{node.value.id}.{node.attr}", []) if home is not None else []
        if home is frame.function:
            bindings = [binding for binding in bindings if _end(binding) < node.lineno]
        if bindings and home is not None:  # args.amp_dtype = torch.float16
            where = next((outer for outer in frame.callers() if outer.function is home), None)
            where = where or frame.lookup.frame(home, frame.instance_of)
            return _assigned(where, home, bindings, [Case(Option(name), ALWAYS)], name, is_constant=False)
    return [Case(Option(name), ALWAYS)]


def _cases_of_own_attribute(frame: Frame, owner: ClassOutline, node: ast.Attribute, name: str) -> list[Case]:
    """Return the cases of ``self.dtype``: what the constructor assigns, then what other methods do."""
    found: list[Case] = []
    bindings = frame.attribute_bindings(owner, node.attr)
    fields = [binding for binding in bindings if binding.function.owner is None]  # in the class's own body
    if fields:
        found = _cases_of_field(frame, owner, node.attr, fields[0], name)
    bindings = [binding for binding in bindings if binding.function.owner is not None]
    bindings.sort(key=lambda binding: (binding.function.name != "__init__", _end(binding)))
    is_constant = len(bindings) == 1 and not fields
    literals = [binding.value.value for binding in bindings if isinstance(binding.value, ast.Constant)]
    others = {binding.function for binding in bindings if binding.function.name != "__init__"} - {frame.function}
    if others and len(literals) == len(bindings) and set(literals) == {True, False}:
        return [Case(Option(name), ALWAYS)]  # another method switches it, at any time: self.should_stop = True
    for binding in bindings:
        if binding.function is frame.function and _end(binding) >= node.lineno and len(bindings) > 1:
            continue
        where = frame if binding.function is frame.function else frame.lookup.frame(binding.function, owner)
        made = _assigned(where, binding.function, [binding], found, name, is_constant)
        found = made
    return found or [Case(Option(name), ALWAYS)]


def _cases_of_field(frame: Frame, owner: ClassOutline, attribute: str, field: Binding, name: str) -> list[Case]:
    """Return the cases of a field of a class: the dtype that it is, unless a constructor gets another one."""
    value = field.value
    if value is not None and not isinstance(value, ast.Constant) and not _is_overridden(owner, attribute):
        made = cases_of(frame.lookup.frame(field.function), value)
        if all(isinstance(case.value, Known) and isinstance(case.value.value, Dtype) for case in made):
            return made
    return [Case(Option(name), ALWAYS)]


@functools.lru_cache(maxsize=256)
def _is_overridden(owner: ClassOutline, attribute: str) -> bool:
    """Whether the file of a class gives this field of it, or all fields, a value of their own somewhere."""
    for node in owner.outline.script.nodes:
        if isinstance(node, ast.Call) and dotted_text(node.func) == owner.name:
            if node.args or any(word.arg in (attribute, None) for word in node.keywords):
                return True
        elif isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store):
            return True
    return False


@functools.lru_cache(maxsize=16)
def _dtypes_named(outline: FileOutline) -> frozenset[str]:
    """Return the dtypes that a file names in strings, as the default of an option; all if it names none."""
    strings = {node.value for node in outline.script.nodes if isinstance(node, ast.Constant) and node.value != ""}
    named = HALF_AND_FULL & strings
    return HALF_AND_FULL if named <= {"float32"} else named


@functools.lru_cache(maxsize=16)
def choices_of(outline: FileOutline) -> dict[str, frozenset[str]]:
    """Return the strings that ``add_argument("--dtype", choices=[...])`` allows, by the argument's name."""
    found: dict[str, frozenset[str]] = {}
    if "add_argument" not in outline.script.text:
        return found
    for node in outline.script.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            words = {word.arg: word.value for word in node.keywords}
            choices = words.get("choices")
            if names and isinstance(choices, ast.List | ast.Tuple | ast.Set):
                long = next((name for name in names if name.startswith("--")), names[0])
                dest = words.get("dest")
                key = dest.value if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
                values = [part.value for part in choices.elts if isinstance(part, ast.Constant)]
                if all(isinstance(value, str) for value in values):
                    found[str(key)] = frozenset(map(str, values))
    return found
