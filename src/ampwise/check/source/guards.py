"""Guards of the branches of an ``if``, normalised so that two ``if``s with the same condition agree."""

from __future__ import annotations

import ast

from ampwise.check.source.events import BranchGuard
from ampwise.check.source.frame import Frame, once_per_node
from ampwise.check.source.names import code_of, dotted_text

Guards = tuple[BranchGuard, ...]
NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}
FOLLOW = 3  # times that a name is followed to the test it holds


def guards_of(test: ast.expr, frame: Frame) -> tuple[Guards, Guards]:
    """Return the guards where ``test`` holds, and those where it does not.

    Where ``A and B`` holds, both hold; where it fails, only the failure of the whole is known. ``A or B`` is the other
    way round. A test for the last of n micro-batches is one guard, also with ``... or last_batch``.
    """
    found = _guards_of(frame, test)
    assert found is not None
    return found


@once_per_node
def _guards_of(frame: Frame, test: ast.expr) -> tuple[Guards, Guards]:
    return _find_guards(test, frame, 0)


def _find_guards(test: ast.expr, frame: Frame, depth: int) -> tuple[Guards, Guards]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _find_guards(test.operand, frame, depth)[::-1]
    boundary = _boundary(test)
    if boundary is not None:
        return boundary
    if isinstance(test, ast.Name | ast.Attribute) and depth < FOLLOW:
        # last = (i + 1) % n == 0, then `if last:`
        values = frame.values(test)
        node, home = values[0] if len(values) == 1 else (None, frame)
        if isinstance(node, ast.Call) and dotted_text(node.func) == "bool" and len(node.args) == 1:
            return _find_guards(node.args[0], home, depth + 1)
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            return _find_guards(node, home, depth + 1)
        # last = (i + 1) % n == 0 or i + 1 == len(loader), whose values are those of its parts
        bindings = frame.function.bindings.get(test.id, ()) if isinstance(test, ast.Name) else ()
        whole = bindings[0].value if len(bindings) == 1 else None
        boundary = _boundary(whole) if isinstance(whole, ast.BoolOp) else None
        if boundary is not None:
            return boundary
    text, positive = _normal(test, frame)
    literal_of = _compared_to_literal(test, text)
    holds: Guards = (BranchGuard(text, positive, test=test, frame=frame, literal_of=literal_of),)
    fails: Guards = (BranchGuard(text, not positive, test=test, frame=frame, literal_of=literal_of),)
    if isinstance(test, ast.BoolOp):
        parts = [_find_guards(part, frame, depth) for part in test.values]
        if isinstance(test.op, ast.And):
            holds = (*[guard for held, _ in parts for guard in held], *holds)
        else:
            fails = (*[guard for _, failed in parts for guard in failed], *fails)
    return holds, fails


def _compared_to_literal(test: ast.expr, text: str) -> str | None:
    """Return the text of ``mode == "amp"`` without the literal; None for another test."""
    right = test.comparators[0] if isinstance(test, ast.Compare) and len(test.ops) == 1 else None
    if not isinstance(right, ast.Constant) or not isinstance(right.value, str | int) or " Eq " not in text:
        return None
    return text.removesuffix(code_of(right))


def _normal(test: ast.expr, frame: Frame) -> tuple[str, bool]:
    """Return a normalised text of the condition, and whether ``test`` is true if it holds.

    ``if x:``, ``if x is not None:`` and ``if x > 0:`` all test whether there is an x: for a scaler, a
    scheduler or a clipping norm they are the same condition.
    """
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return f"some({frame.key(test) or code_of(test)})", True
    operator, right = type(test.ops[0]), test.comparators[0]
    left = frame.key(test.left) or code_of(test.left)
    if isinstance(right, ast.Constant) and (right.value is None or right.value in (0, False, "")):
        if operator in (ast.IsNot, ast.NotEq, ast.Gt):
            return f"some({left})", True
        if operator in (ast.Is, ast.Eq):
            return f"some({left})", False
    positive = NEGATED.get(operator, operator)
    return f"{left} {positive.__name__} {frame.key(right) or code_of(right)}", operator not in NEGATED


def _boundary(test: ast.expr) -> tuple[Guards, Guards] | None:
    """Return the guards of a test for the end of an accumulation window of n micro-batches, else None.

    The forms are ``(i + 1) % n == 0``, ``not step % n`` and ``step % n != n - 1``.
    """
    if isinstance(test, ast.BoolOp):
        found = [guards for part in test.values if (guards := _boundary(part)) is not None]
        if not found:
            return None
        # With `or`, failing means that no part held; with `and`, holding means that all did.
        holds, fails = found[0]
        return (holds, fails) if isinstance(test.op, ast.Or) else (holds, ())
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _boundary(test.operand)
        return inner and (inner[1], inner[0])
    modulo, at_end = None, False
    if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod) and not isinstance(test.left, ast.Constant):
        modulo = test  # `if i % n:` holds between the ends
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = [side for side in (test.left, test.comparators[0]) if isinstance(side, ast.BinOp)]
        modulo = next((side for side in sides if isinstance(side.op, ast.Mod)), None)
        at_end = isinstance(test.ops[0], ast.Eq | ast.Is)
    if modulo is None:
        return None
    size = code_of(modulo.right)
    at = BranchGuard(f"boundary({size})", True, boundary=size, test=test)
    off = BranchGuard(f"boundary({size})", False, boundary=size, test=test)
    return ((at,), (off,)) if at_end else ((off,), (at,))
