"""A difference in words: errors as people compare them, what was found first, what to do about a place."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from ampwise.evidence.compared import BEYOND, FLOOR_TIMES, Measured, finite
from ampwise.evidence.difference import BACKWARD, FUNCTION, Differing, SideFacts, Spot
from ampwise.evidence.op_families import base_name
from ampwise.evidence.wording import number

__all__ = [
    "BASES",
    "error_text",
    "evidence_of",
    "headline",
    "keep_fix",
    "loss_text",
    "op_text",
    "proof",
    "spot_text",
    "times_text",
    "title",
]

TITLES = {"fp32": "FP32", "tf32": "TF32", "fp16": "FP16", "bf16": "BF16", "fp64": "FP64"}
MANY = 16  # values, from which on a direction says something
SMALL = 1e-5  # below which a share is written as a power of ten
BASES = {
    "errors": "measured here: the step is run on both sides with the same weights, batch and random numbers; sums of "
    "squares in FP64",
    "expected_error": "derived: the largest error that a place was given, and a unit roundoff for each of its "
    f"operations, in squares; beyond is more than {BEYOND:.0f} times that",
    "noise_floor": "measured here: the error between two runs of side a",
    "gradients": "unscaled, not clipped: as the optimizer gets them",
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
        return f"×{number(error)}"
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


def title(side: SideFacts) -> str:
    """What a side rounds to."""
    return TITLES.get(side.precision, side.precision.upper())


def loss_text(differing: Differing) -> str:
    """How far the losses are apart; nothing where one is not finite, or there is none."""
    error = differing.loss_error
    if error is None:
        return ""
    return f"The losses are {error_text(error)} apart." if error else "The losses are the same."


def headline(differing: Differing) -> str:
    """The answer in a sentence."""
    sides = f"{differing.b.label} against {differing.a.label}"
    if differing.unsteady:
        apart = f"two runs of a are {error_text(differing.floor)} apart (`{differing.floor_at}`)"
        return f"{sides}: the function does not do the same twice: {apart}"
    if differing.first is not None:
        more = len(differing.spots) - 1
        others = f" ({more} more after it)" if more else ""
        return f"{sides}: rounding does not explain {differing.first.where}{others}"
    if _is_noise(differing):
        return f"{sides}: no further apart than two runs of a are, {error_text(differing.floor)}"
    worst, returned = differing.worst_row, _largest_returned(differing)
    if worst is None and returned:
        return f"{sides}: what the function returns is {error_text(returned)} apart"
    if worst is None:
        what = "every module returns" if differing.rows else "what the function returns is"
        return f"{sides}: {what} the same"
    off = f"modules are up to {error_text(worst.error)} off (`{worst.label}`)"
    if differing.piled_up is None:
        return f"{sides}: all of it is explained by rounding; {off}"
    phase, growth = differing.piled_up
    if phase == BACKWARD:
        off = f"gradients are up to {error_text(growth.largest)} off (`{growth.largest_at}`)"
    return f"{sides}: rounding explains each place, and piles up; {off}"


def spot_text(spot: Spot) -> str:
    """How bad, and what it was made of: the rest of a sentence that begins with the place."""
    compared = spot.compared
    if compared.why_not:
        return f"cannot be compared: {compared.why_not}"
    measured = compared.measured
    if measured is not None and measured.changed:
        return f"has {measured.changed:,} of {measured.values:,} whole numbers that are others"
    if measured is not None and measured.apart:
        bad = f"{measured.bad_b:,} of {measured.values:,} values that are not finite in b, and {measured.bad_a:,} in a"
        return f"has {bad}" + (", others or elsewhere" if measured.bad_a == measured.bad_b else "")
    times = "" if compared.times is None else f", {times_text(compared.times)} times what rounding explains"
    return (
        f"is {error_text(compared.error)} off{times}: it was given {error_text(compared.given)}{_stretched(measured)}"
    )


def _stretched(measured: Measured | None) -> str:
    """Where all of the error is a factor."""
    cosine = None if measured is None else measured.cosine
    if measured is None or cosine is None or measured.values < MANY:
        return ""
    turned = math.sqrt(max(0.0, 2 - 2 * cosine))
    if turned > measured.relative / BEYOND:
        return ""
    return f"; its direction is the same, its length is {measured.norm_b / measured.norm_a:.3g} times a's"


def op_text(spot: Spot) -> str:
    """The operation that one found there, and its line: " The operation is `sub`, train.py:14."."""
    if spot.op is None:
        return ""
    site = spot.op.site
    line = f", {PurePath(site.file).name}:{site.line}" if site.file else ""
    return f" The operation is `{base_name(spot.op.op)}`{line}."


def evidence_of(spot: Spot) -> dict[str, Any]:
    """Of a finding."""
    compared, measured = spot.compared, spot.compared.measured
    told = {
        "phase": spot.phase,
        "relative_error": finite(compared.error),
        "times_expected": None if compared.times is None else finite(compared.times),
        "given": finite(compared.given),
        "op": None if spot.op is None else spot.op.op,
        "largest_error_at": None if measured is None else list(measured.largest_at),
    }
    return {name: value for name, value in told.items() if value is not None}


def keep_fix(differing: Differing, spot: Spot, also: str = "") -> str:
    """How to compute a place in FP32; also: what else should be."""
    name = _module(spot)
    if not name:
        together = also or "what makes its inputs"
        return f'Put this code into a function with `@ampwise.keep("fp32")`, together with {together}'
    return f"Keep it in FP32: `{_policy(differing, name)}`{f', and {also}' if also else ''}"


def proof(differing: Differing, spot: Spot) -> str:
    """The call that shows whether it helped."""
    name = _module(spot)
    if not name:
        return f"`ampwise.diff` of the same again, with b={differing.b.label!r}, shows whether it is gone."
    return f"`ampwise.diff(fn, …, b={_policy(differing, name)})` shows what is left."


def _policy(differing: Differing, name: str) -> str:
    base = differing.b.precision if differing.b.precision in ("bf16", "fp16") else "bf16"
    return f'Policy("{base}").keep("fp32", "{name}")'


def _is_noise(differing: Differing) -> bool:
    growth = differing.growth()
    largest = _largest_returned(differing) if growth is None else growth.largest
    return bool(differing.floor) and bool(largest) and (largest or 0.0) <= FLOOR_TIMES * (differing.floor or 0.0)


def _module(spot: Spot) -> str:
    """As a policy names the module to keep; "" where that is the model itself, or code outside of it."""
    name = spot.after if spot.phase == BACKWARD else spot.module
    plain = name.partition(" (call")[0]
    return "" if plain in (FUNCTION, spot.kind) else plain


def _largest_returned(differing: Differing) -> float | None:
    return max((each.error for each in differing.returned), default=None)
