"""Words about differences: errors, locations, and what to do about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING

from ampwise.numbers.number_text import number_text
from ampwise.numbers.op_families import base_name

if TYPE_CHECKING:
    from ampwise.tune.diff.step_difference import ErrorLocation, SideFacts, StepDifference

TITLES = {"fp32": "FP32", "tf32": "TF32", "fp16": "FP16", "bf16": "BF16", "fp64": "FP64"}
MOST = 5  # locations that a rule reports
SMALL = 1e-5  # smaller fractions are written in scientific notation


def error_text(error: float | None) -> str:
    """
    >>> error_text(0.0312), error_text(0.0006), error_text(2.1e-07), error_text(0.0), error_text(float("inf"))
    ('3.1%', '0.06%', '2.1e-07', '0', 'inf')
    """
    if error is None:
        return ""
    if not math.isfinite(error):
        return "inf"
    if error >= 10:
        return f"×{number_text(error)}"
    if error < SMALL:
        return f"{error:.2g}"
    return f"{error:.0%}" if error >= 0.1 else f"{error * 100:.2g}%"


def times_text(times: float | None) -> str:
    """
    >>> times_text(52.31), times_text(0.41), times_text(float("inf")), times_text(None)
    ('52', '0.41', 'inf', '')
    """
    if times is None:
        return ""
    return "inf" if math.isinf(times) else f"{times:.2g}" if times < 10 else f"{times:,.0f}"


def side_title(side: SideFacts) -> str:
    """Return the format that a side rounds to."""
    return TITLES.get(side.precision, side.precision.upper())


def spot_text(spot: ErrorLocation) -> str:
    """Return how large the error is and where it comes from: the predicate of a sentence about the location."""
    compared = spot.compared
    if compared.why_not:
        return f"cannot be compared: {compared.why_not}"
    measured = compared.measured
    if measured is not None and measured.changed:
        return f"has {measured.changed:,} of {measured.values:,} integers that differ"
    if measured is not None and measured.apart:
        bad = f"{measured.bad_b:,} of {measured.values:,} values that are not finite in b, and {measured.bad_a:,} in a"
        return f"has {bad}" + (
            ", at different positions or of a different kind" if measured.bad_a == measured.bad_b else ""
        )
    stretched = ""
    if measured is not None and measured.only_length_differs:
        stretched = f"; its direction is the same, its length is {measured.norm_b / measured.norm_a:.3g} times a's"
    times = "" if compared.times is None else f", {times_text(compared.times)} times what rounding explains"
    return f"is {error_text(compared.error)} off{times}: its input was {error_text(compared.given)} off{stretched}"


def op_text(spot: ErrorLocation) -> str:
    """Return the operation found there, and its line: " The operation is `sub`, train.py:14."."""
    if spot.op is None:
        return ""
    site = spot.op.site
    line = f", {PurePath(site.file).name}:{site.line}" if site.file else ""
    return f" The operation is `{base_name(spot.op.op)}`{line}."


def first_spots(differing: StepDifference, cause: str) -> Iterator[ErrorLocation]:
    """Return the first locations whose error has this cause."""
    return islice(differing.caused_by(cause), MOST)


def keep_fix(differing: StepDifference, spot: ErrorLocation, also: str = "", other: str = "") -> str:
    """Return how to compute a location in FP32, and the call that shows whether it helped.

    also: what else should be in FP32. other: another way, with a leading comma.
    """
    name, base = spot.policy_name, differing.b.precision
    if not name:
        return (
            'Put this code into a function with `@ampwise.keep("fp32")`, together with '
            f"{also or 'the code that computes its inputs'}{other}. "
            f"Run the same `ampwise.diff` again, with b={differing.b.label!r}, to check."
        )
    policy = f'Policy("{base if base in ("bf16", "fp16") else "bf16"}").keep("fp32", "{name}")'
    keep = f"Keep it in FP32: `{policy}`{f', and {also}' if also else ''}{other}"
    return f"{keep}. `ampwise.diff(fn, …, b={policy})` shows the remaining error."
