"""The result of a comparison in one sentence, and how its numbers were obtained."""

from __future__ import annotations

from ampwise.rules.amp53x_differences.wording import error_text
from ampwise.tune.diff.step_difference import BACKWARD, StepDifference
from ampwise.tune.diff.tensor_difference import BEYOND, FLOOR_TIMES

__all__ = ["BASES", "difference_headline", "loss_text"]

BASES = {
    "errors": "measured here: the step is run on both sides with the same weights, batch and random numbers; sums of "
    "squares in FP64",
    "expected_error": "derived: the largest input error of a location, and a unit roundoff for each of its "
    f"operations, in squares; beyond is more than {BEYOND:.0f} times that",
    "noise_floor": "measured here: the error between two runs of side a",
    "gradients": "unscaled and not clipped, as the optimizer gets them",
}


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


def _is_noise(differing: StepDifference) -> bool:
    growth = differing.growth()
    largest = _largest_returned(differing) if growth is None else growth.largest
    return bool(differing.floor) and bool(largest) and (largest or 0.0) <= FLOOR_TIMES * (differing.floor or 0.0)


def _largest_returned(differing: StepDifference) -> float | None:
    return max((each.error for each in differing.returned), default=None)
