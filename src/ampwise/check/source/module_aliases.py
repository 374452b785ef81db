"""What a module also is: what it was passed, returned or wrapped as, and the module that it is a part of."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.check.source.cases import ALWAYS, Conditions, Made, cases_of, joined
from ampwise.check.source.casts import cast_dtypes, last_cast, moved
from ampwise.check.source.frame import Frame
from ampwise.check.source.names import last_name
from ampwise.check.source.outline import FunctionOutline
from ampwise.check.source.tree_walk import walk

DEEPEST = 6  # calls into functions that return a module
REGISTERS = ("__init__", "add_module", "register_module")  # a module as a part of another
MOST_ALIASES = 48  # names and calls that may be one module


def aliases(node: ast.expr, frame: Frame) -> Iterator[tuple[ast.expr, Frame, Conditions]]:
    """Yield what a module also is: what was passed, returned or wrapped, up to a cast, with the conditions."""
    pending: list[tuple[ast.expr, Frame, Conditions]] = [(node, frame, ALWAYS)]
    seen: set[object] = set()
    for part, home, given in pending:
        again = part, home.function, home.call, frozenset(given.items())  # the same name may hold another one later
        if again in seen or len(seen) > MOST_ALIASES:
            continue
        seen.add(again)
        callee = home.callee(part) if isinstance(part, ast.Call) else None
        if isinstance(part, ast.Call) and callee is not None and callee[0].returns and len(home.callers()) < DEEPEST:
            inside = home.enter(callee[0], part, callee[1])
            pending += [(value, inside, given) for value in callee[0].returns if value is not None]
        elif isinstance(part, ast.Call):
            statement = home.outline.script.parents.get(part)
            is_cast = bool(cast_dtypes(part, home))
            in_own_file = home.outline is frame.outline  # where its name has this cast, and what comes later
            if isinstance(statement, ast.Assign) and in_own_file:
                pending += [(target, home, given) for target in statement.targets]
                inner = last_cast(part, home)[1] if is_cast else moved(part, home)
            else:
                yield part, home, given
                inner = moved(part, home)
            if callee is not None and callee[0].name == "__init__":  # Wrapper(student) has its parameters
                pending += [(word, home, given) for word in _kept_by(callee[0], home.enter(callee[0], part, callee[1]))]
            if home.qualified(part.func) == "torch.nn.Sequential":
                pending += [(layer, home, given) for layer in part.args if isinstance(layer, ast.Name | ast.Call)]
            if inner is not None and (not is_cast or (isinstance(statement, ast.Assign) and in_own_file)):
                pending.append((inner, home, given))
        else:
            yield part, home, given
            if isinstance(part, ast.Name) and part.id in home.arguments and home.caller is not None:
                pending.append((home.arguments[part.id], home.caller, given))
            for made, where in home.values(part):
                if isinstance(made, ast.Call) and where.callee(made) is not None:
                    pending.append((made, where, given))  # a function that may cast what it gets
            for value, when in cases_of(home, part):
                together = joined(given, when)
                if isinstance(value, Made) and value.node is not part and together is not None:
                    pending.append((value.node, value.frame, together))


def _kept_by(init: FunctionOutline, frame: Frame) -> list[ast.Name]:
    """Return the arguments that a module keeps as parts of it; not those that it only asks for something."""
    kept = {each.id for each in walk(init.node) if isinstance(each, ast.Name) and _is_kept(each, init)}
    return [given for name, given in frame.arguments.items() if name in kept and isinstance(given, ast.Name)]


def _is_kept(name: ast.Name, init: FunctionOutline) -> bool:
    """Whether a module becomes part of another: ``self.net = net``, ``nn.Sequential(net)``, ``ModuleList([net])``."""
    parents = init.outline.script.parents
    outer = parents[name]
    if isinstance(outer, ast.Assign):
        return any(isinstance(target, ast.Attribute) for target in outer.targets)
    while isinstance(outer, ast.List | ast.Tuple | ast.keyword):
        outer = parents[outer]
    called = last_name(outer.func) if isinstance(outer, ast.Call) and outer.func is not name else ""
    return called[:1].isupper() or called in REGISTERS
