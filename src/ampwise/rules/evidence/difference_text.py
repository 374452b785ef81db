"""Text about a difference: errors, the first finding, and what to do about a location."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from ampwise.rules.evidence.difference import BACKWARD, FUNCTION, ErrorLocation, SideFacts, StepDifference
from ampwise.rules.evidence.number_text import number_text
from ampwise.rules.evidence.op_families import base_name
from ampwise.rules.evidence.tensor_difference import BEYOND, FLOOR_TIMES, TensorDifference, finite_or_none

__all__ = [
    "BASES",
    "diff_command",
    "difference_headline",
    "error_text",
    "keep_fix",
    "location_evidence",
    "loss_text",
    "op_text",
    "side_title",
    "spot_text",
    "times_text",
]

TITLES = {"fp32": "FP32", "tf32": "TF32", "fp16": "FP16", "bf16": "BF16", "fp64": "FP64"}
MANY = 16  # values: with fewer, a direction means little
SMALL = 1e-5  # smaller fractions are written in scientific notation
BASES = {
    "errors": "measured here: the step is run on both sides with the same weights, batch and random numbers; sums of "
    "squares in FP64",
    "expected_error": "derived: the largest input error of a location, and a unit roundoff for each of its "
    f"operations, in squares; beyond is more than {BEYOND:.0f} times that",
    "noise_floor": "measured here: the error between two runs of side a",
    "gradients": "unscaled and not clipped, as the optimizer gets them",
}


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


def loss_text(differing: StepDifference) -> str:
    """Return how far apart the losses are; empty if one is missing or not finite."""
    error = differing.loss_error
    if error is None:
        return ""
    return f"The losses differ by {error_text(error)}." if error else "The losses are equal."


def difference_headline(differing: StepDifference) -> str:
    """Return the result in one sentence."""
    sides = f"{differing.b.label} against {differing.a.label}"
    if differing.unsteady:
        apart = f"two runs of a differ by {error_text(differing.floor)} (`{differing.floor_at}`)"
        return f"{sides}: the function is not repeatable: {apart}"
    if differing.first is not None:
        more = len(differing.spots) - 1
        others = f" ({more} more after it)" if more else ""
        return f"{sides}: rounding does not explain {differing.first.where}{others}"
    if _is_noise(differing):
        return f"{sides}: they differ no more than two runs of a do, {error_text(differing.floor)}"
    worst, returned = differing.worst_row, _largest_returned(differing)
    if worst is None and returned:
        return f"{sides}: the function's outputs differ by {error_text(returned)}"
    if worst is None:
        what = "every module returns" if differing.rows else "what the function returns is"
        return f"{sides}: {what} the same"
    off = f"modules are up to {error_text(worst.error)} off (`{worst.label}`)"
    if differing.piled_up is None:
        return f"{sides}: rounding explains everything; {off}"
    phase, growth = differing.piled_up
    if phase == BACKWARD:
        off = f"gradients are up to {error_text(growth.largest)} off (`{growth.largest_at}`)"
    return f"{sides}: rounding explains every location, but accumulates; {off}"


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
    times = "" if compared.times is None else f", {times_text(compared.times)} times what rounding explains"
    return (
        f"is {error_text(compared.error)} off{times}: its input was {error_text(compared.given)} "
        f"off{_stretched(measured)}"
    )


def _stretched(measured: TensorDifference | None) -> str:
    """Return a remark if the error is a pure factor."""
    cosine = None if measured is None else measured.cosine
    if measured is None or cosine is None or measured.values < MANY:
        return ""
    turned = math.sqrt(max(0.0, 2 - 2 * cosine))
    if turned > measured.relative / BEYOND:
        return ""
    return f"; its direction is the same, its length is {measured.norm_b / measured.norm_a:.3g} times a's"


def op_text(spot: ErrorLocation) -> str:
    """Return the operation found there, and its line: " The operation is `sub`, train.py:14."."""
    if spot.op is None:
        return ""
    site = spot.op.site
    line = f", {PurePath(site.file).name}:{site.line}" if site.file else ""
    return f" The operation is `{base_name(spot.op.op)}`{line}."


def location_evidence(spot: ErrorLocation) -> dict[str, Any]:
    """Return the evidence of a finding."""
    compared, measured = spot.compared, spot.compared.measured
    known = {
        "phase": spot.phase,
        "relative_error": finite_or_none(compared.error),
        "times_expected": None if compared.times is None else finite_or_none(compared.times),
        "given": finite_or_none(compared.given),
        "op": None if spot.op is None else spot.op.op,
        "largest_error_at": None if measured is None else list(measured.largest_at),
    }
    return {name: value for name, value in known.items() if value is not None}


def keep_fix(differing: StepDifference, spot: ErrorLocation, also: str = "") -> str:
    """Return how to compute a location in FP32. ``also``: what else should be in FP32."""
    name = _module(spot)
    if not name:
        together = also or "the code that computes its inputs"
        return f'Put this code into a function with `@ampwise.keep("fp32")`, together with {together}'
    return f"Keep it in FP32: `{_policy(differing, name)}`{f', and {also}' if also else ''}"


def diff_command(differing: StepDifference, spot: ErrorLocation) -> str:
    """Return the call that shows whether the fix helped."""
    name = _module(spot)
    if not name:
        return f"Run the same `ampwise.diff` again, with b={differing.b.label!r}, to check."
    return f"`ampwise.diff(fn, …, b={_policy(differing, name)})` shows the remaining error."


def _policy(differing: StepDifference, name: str) -> str:
    base = differing.b.precision if differing.b.precision in ("bf16", "fp16") else "bf16"
    return f'Policy("{base}").keep("fp32", "{name}")'


def _is_noise(differing: StepDifference) -> bool:
    growth = differing.growth()
    largest = _largest_returned(differing) if growth is None else growth.largest
    return bool(differing.floor) and bool(largest) and (largest or 0.0) <= FLOOR_TIMES * (differing.floor or 0.0)


def _module(spot: ErrorLocation) -> str:
    """Return the name of the module to keep, for a policy; "" for the model itself, or code outside it."""
    name = spot.after if spot.phase == BACKWARD else spot.module
    plain = name.partition(" (call")[0]
    return "" if plain in (FUNCTION, spot.kind) else plain


def _largest_returned(differing: StepDifference) -> float | None:
    return max((each.error for each in differing.returned), default=None)
