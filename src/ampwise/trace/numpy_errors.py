"""NumPy's floating-point errors in the script's own code, with what the statements were given and assigned."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import code_owner, site_of
from ampwise.trace.names_in_code import bound_names, call_name, free_names, tree_of
from ampwise.trace.replay import is_finite

__all__ = ["KINDS", "MOST", "NumpyError", "as_array", "error_here", "is_bad", "numpy_errors"]

MOST = 100
MOST_NUMBERS = 2**17  # items of a list to look at
MOST_DEPTH = 4
KINDS = {
    "divide by zero": "a division by zero",
    "invalid value": "an invalid value, such as 0/0",
    "overflow": "an overflow",
}
REPAIRS = ("nan_to_num", "where", "clip")


class NumpyError(NamedTuple):
    """A floating-point error of NumPy."""

    kind: str  # "divide by zero", "invalid value", "overflow"
    site: CallSite
    frame: FrameType  # of the script's function, which keeps its variables
    statement: ast.stmt | None
    was_given_bad: bool  # a variable that the statement reads was not finite

    @property
    def is_repaired(self) -> bool:
        """Whether what the statement assigned is finite in the end: `np.where(std > 0, x / std, 0)`."""
        if self.statement is None:
            return False
        names = [name for name in bound_names(self.statement) if name in self.frame.f_locals]
        if not names:  # `return np.nan_to_num(x / std)`
            return self.calls_repair
        return not any(is_bad(self.frame.f_locals[name]) for name in names)

    @property
    def calls_repair(self) -> bool:
        every = ast.walk(self.statement) if self.statement is not None else ()
        return any(isinstance(node, ast.Call) and call_name(node) in REPAIRS for node in every)


def error_here(kind: str, outside: CodeType | None = None) -> NumpyError | None:
    """Return the error in the innermost function of the script; None if there is none before a frame of ``outside``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and code_owner(frame.f_code.co_filename) != "own":
        frame = None if frame.f_code is outside else frame.f_back
    if frame is None:
        return None
    code, line = frame.f_code, frame.f_lineno
    tree = tree_of(code.co_filename)
    every = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)] if tree is not None else []
    here = [node for node in every if not hasattr(node, "body") and node.lineno <= line <= (node.end_lineno or 0)]
    read = free_names(here[-1]) if here else set()  # by the innermost statement without a block of its own
    given_bad = any(is_bad(frame.f_locals[name]) for name in read if name in frame.f_locals)
    site = site_of((code.co_filename, line, code.co_name), None)
    return NumpyError(kind, site, frame, here[-1] if here else None, given_bad)


@contextmanager
def numpy_errors(found: list[NumpyError]) -> Iterator[None]:
    """Within the context, add NumPy's errors to the list; NumPy itself neither warns nor raises."""
    outside = sys._getframe(2).f_code  # frames from this on did not call NumPy for the sake of what is observed

    def note(kind: str, flag: int) -> None:
        error = error_here(kind, outside) if len(found) < MOST else None
        if error is not None:
            found.append(error)

    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    with numpy.errstate(all="call", under="ignore", call=note):
        yield


def is_bad(value: Any, depth: int = MOST_DEPTH) -> bool:
    """Return whether numbers, tensors or arrays in a value are not finite."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Tensor):
        return not is_finite(value)
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return bool(depth) and any(is_bad(each, depth - 1) for each in islice(parts, MOST_NUMBERS))
    numbers = as_array(value)
    return numbers is not None and not bool(sys.modules["numpy"].isfinite(numbers).all())


def as_array(value: Any) -> Any:
    """Return the floating-point numbers of an array, or of a column or table of pandas; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and not isinstance(value, numpy.ndarray | numpy.generic):
        if type(value).__module__.partition(".")[0] != "pandas":
            return None
        with suppress(Exception):
            value = value.select_dtypes("number") if value.ndim == 2 else value
            value = value.to_numpy(dtype=float)
    is_float = getattr(getattr(value, "dtype", None), "kind", "") == "f"
    return value if numpy is not None and is_float else None
