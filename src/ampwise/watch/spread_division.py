"""The line of a script that standardises its data, for columns that are NaN as a whole.

A division by the standard deviation of a column, or by its range, gives NaN for all of a constant column, and of one
with a NaN. It ran before anything was watched; but where the code has a single such division without a guard, it is
the one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import says
from ampwise.trace.failure import Failure
from ampwise.trace.names_in_code import FUNCTIONS, call_name, tree_of

__all__ = ["BY_SPREAD", "with_spread_division"]

BY_SPREAD = "whole columns are NaN, as after a division by the spread of a constant column, or of one with a NaN,"
FIX = (
    "Leave out constant columns and missing values, and keep the divisor away from 0: `std.clamp_min(1e-6)`. "
    "`torch.nan_to_num` on the batch hides the cause, and the model learns from zeros."
)
SPREADS = ("std", "nanstd", "ptp", "std_mean")
HIGHEST, LOWEST = ("max", "amax", "nanmax"), ("min", "amin", "nanmin")
GUARDS = ("clamp", "clamp_min", "clip", "maximum", "where", "masked_fill", "nan_to_num")


def with_spread_division(failure: Failure, files: Iterable[str]) -> Failure:
    """Return a failure of bad data with the line that has standardised them, if whole columns are NaN."""
    source = failure.source
    values = None if source is None else source.values
    if source is None or values is None or len(values.shape) < 2:
        return failure
    rows, bad = values.shape[0], values.special
    is_nan_only = bad.get("NaN", 0) > 0 and not (bad.get("inf") or bad.get("-inf"))
    is_whole = is_nan_only and source.bad_rows == rows > 1 and bad["NaN"] % rows == 0
    lines = [site for file in files for site in _divisions(file)] if is_whole else []
    if len(lines) != 1:
        return failure
    if source.drawn is None:
        return failure.but(source=replace(source, made_at=lines[0], made_by=BY_SPREAD))
    drawn = replace(source.drawn, how="computed", cause=BY_SPREAD.rstrip(","), fix=FIX, site=lines[0])
    return failure.but(source=replace(source, drawn=drawn))


@lru_cache(maxsize=4096)  # all files of a script's own code are asked about
def _divisions(file: str) -> tuple[CallSite, ...]:
    """Return the lines of a file that divide by a standard deviation or a range, without a guard."""
    has_range = says(file, "max(", "min(")
    tree = tree_of(file) if has_range or any(says(file, f"{name}(") for name in SPREADS) else None
    nodes = list(ast.walk(tree)) if tree is not None else []
    divisions = [each for each in nodes if isinstance(each, ast.BinOp | ast.AugAssign) and isinstance(each.op, ast.Div)]
    spreads = _names_of_spreads(nodes) if divisions else {}
    functions = [each for each in nodes if isinstance(each, FUNCTIONS)]
    found = []
    for node in divisions:
        divisor = node.right if isinstance(node, ast.BinOp) else node.value
        if _is_spread(divisor, spreads):
            around = [each.name for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
            if "forward" not in around:  # of a model
                found.append(CallSite(file=file, line=node.lineno, function=around[-1] if around else ""))
    return tuple(found)


def _names_of_spreads(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return the names of standard deviations, and of highest and lowest values, that nothing guards."""
    found: dict[str, str] = {}
    guarded: set[str] = set()
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Subscript):
                guarded.add(_last(target.value))  # `std[std == 0] = 1`
                continue
            pairs = [(target, node.value)]  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # type: ignore[attr-defined]
                pairs = list(zip(target.elts, node.value.elts, strict=False))  # type: ignore[attr-defined]
            for one, value in pairs:
                kind = _kind(value)
                if kind == "guarded":
                    guarded.add(_last(one))
                elif kind:
                    found[_last(one)] = kind
    return {name: kind for name, kind in found.items() if name and name not in guarded}


def _kind(value: ast.expr) -> str:
    calls = [call_name(each) for each in ast.walk(value) if isinstance(each, ast.Call)]
    if any(each in GUARDS for each in calls) or any(isinstance(each, ast.Add | ast.IfExp) for each in ast.walk(value)):
        return "guarded"
    for kind, names in (("spread", SPREADS), ("highest", HIGHEST), ("lowest", LOWEST)):
        if any(each in names for each in calls):
            return "" if kind == "spread" and "std_mean" in calls else kind
    return ""


def _is_spread(divisor: ast.expr, names: dict[str, str]) -> bool:
    if isinstance(divisor, ast.BinOp) and isinstance(divisor.op, ast.Sub):
        sides = [names.get(_last(each)) or _kind(each) for each in (divisor.left, divisor.right)]
        return sides == ["highest", "lowest"]
    return (names.get(_last(divisor)) or _kind(divisor)) == "spread"


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
