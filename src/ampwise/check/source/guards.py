"""Guards of the branches of an ``if``, normalised so that two ``if``s with the same condition agree."""

from __future__ import annotations

import ast

from ampwise.check.source.events import BranchGuard
from ampwise.check.source.frame import Frame

__all__ = ["guards_of"]

Guards = tuple[BranchGuard, ...]
NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}
FOLLOW = 3  # times that a name is followed to the test it holds


def guards_of(test: ast.expr, frame: Frame, depth: int = 0) -> tuple[Guards, Guards]:
    """Return the guards where ``test`` holds, and those where it does not.

    Where ``A and B`` holds, both hold; where it fails, only the failure of the whole is known. ``A or B`` is the other
    way round. A test for the last of n micro-batches is one guard, also with ``... or last_batch``.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds, fails = guards_of(test.operand, frame, depth)
        return fails, holds
    boundary = _boundary(test, frame)
    if boundary is not None:
        return boundary
    if isinstance(test, ast.BoolOp):
        return _of_parts(test, frame, depth)
    if isinstance(test, ast.Name | ast.Attribute) and depth < FOLLOW:
        followed = _followed(test, frame, depth)
        if followed is not None:
            return followed
    return _atom(test, frame)


def _of_parts(test: ast.BoolOp, frame: Frame, depth: int) -> tuple[Guards, Guards]:
    parts = [guards_of(part, frame, depth) for part in test.values]
    (holds,), (fails,) = _atom(test, frame)
    if isinstance(test.op, ast.And):
        return (*(guard for held, _ in parts for guard in held), holds), (fails,)
    return (holds,), (*(guard for _, failed in parts for guard in failed), fails)


def _atom(test: ast.expr, frame: Frame) -> tuple[Guards, Guards]:
    text, holds = _normal(test, frame)
    return (BranchGuard(text, holds, test=test),), (BranchGuard(text, not holds, test=test),)


def _normal(test: ast.expr, frame: Frame) -> tuple[str, bool]:
    """Return a normalised text of the condition, and whether ``test`` is true if it holds.

    ``if x:``, ``if x is not None:`` and ``if x > 0:`` all test whether there is an x: for a scaler, a
    scheduler or a clipping norm they are the same condition.
    """
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        operator, right = type(test.ops[0]), test.comparators[0]
        nothing = isinstance(right, ast.Constant) and (right.value is None or right.value in (0, False, ""))
        if nothing and operator in (ast.IsNot, ast.NotEq, ast.Gt):
            return f"some({_text(test.left, frame)})", True
        if nothing and operator in (ast.Is, ast.Eq):
            return f"some({_text(test.left, frame)})", False
        positive = NEGATED.get(operator, operator)
        text = f"{_text(test.left, frame)} {positive.__name__} {_text(right, frame)}"
        return text, operator not in NEGATED
    return f"some({_text(test, frame)})", True


def _text(node: ast.expr, frame: Frame) -> str:
    return frame.key(node) or ast.unparse(node)


def _boundary(test: ast.expr, frame: Frame) -> tuple[Guards, Guards] | None:
    """Return the guards of a test for the end of an accumulation window of n micro-batches, else None.

    The forms are ``(i + 1) % n == 0``, ``not step % n`` and ``step % n != n - 1``.
    """
    if isinstance(test, ast.BoolOp):
        found = [guards for part in test.values if (guards := _boundary(part, frame)) is not None]
        if not found:
            return None
        # With `or`, failing means that no part held; with `and`, holding means that all did.
        holds, fails = found[0]
        return (holds, fails) if isinstance(test.op, ast.Or) else (holds, ())
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _boundary(test.operand, frame)
        return inner and (inner[1], inner[0])
    modulo, at_end = _modulo(test)
    if modulo is None:
        return None
    size = ast.unparse(modulo.right)
    at = BranchGuard(f"boundary({size})", True, boundary=size, test=test)
    off = BranchGuard(f"boundary({size})", False, boundary=size, test=test)
    return ((at,), (off,)) if at_end else ((off,), (at,))


def _modulo(test: ast.expr) -> tuple[ast.BinOp | None, bool]:
    if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod) and not isinstance(test.left, ast.Constant):
        return test, False  # `if i % n:` holds between the ends
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        for side in (test.left, test.comparators[0]):
            if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod):
                return side, isinstance(test.ops[0], ast.Eq | ast.Is)
    return None, False


def _followed(test: ast.Name | ast.Attribute, frame: Frame, depth: int) -> tuple[Guards, Guards] | None:
    """Return the guards of the test that a name holds: ``last = (i + 1) % n == 0``, then ``if last:``."""
    values = frame.values(test)
    if len(values) != 1 or values[0].node is None:
        return None
    node = values[0].node
    if (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and isinstance(node.func, ast.Name)
        and node.func.id == "bool"
    ):
        node = node.args[0]
    if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp) or node is not values[0].node:
        return guards_of(node, values[0].frame, depth + 1)
    return None
