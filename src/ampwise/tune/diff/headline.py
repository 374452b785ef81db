"""Sentences about a difference: the result, its sides, growth and noise, and how its numbers were obtained."""

from __future__ import annotations

from ampwise.numbers.number_text import number_text, scale_text
from ampwise.tune.diff.step_difference import BACKWARD, FORWARD, StepDifference
from ampwise.tune.diff.tensor_difference import BEYOND, FLOOR_TIMES
from ampwise.tune.diff.token_difference import ENOUGH
from ampwise.tune.diff.wording import error_text

BASES = {
    "errors": "measured here: the step is run on both sides with the same weights, batch and random numbers; sums of "
    "squares in FP64",
    "expected_error": "derived: the largest input error of a location, and a unit roundoff for each of its "
    f"operations, in squares; beyond is more than {BEYOND:.0f} times that",
    "noise_floor": "measured here: the error between two runs of side a",
    "gradients": "unscaled and not clipped, as the optimizer gets them",
}
DIRECTIONS = {FORWARD: "Forward, along the calls", BACKWARD: "Backward, from the loss"}


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
    worst, growth = differing.worst_row, differing.growth()
    returned = max((each.error for each in differing.returned), default=None)
    largest = returned if growth is None else growth.largest
    if differing.floor and largest and largest <= FLOOR_TIMES * differing.floor:
        return f"{sides}: they differ no more than two runs of a do, {error_text(differing.floor)}"
    if worst is None and returned:
        return f"{sides}: the function's outputs differ by {error_text(returned)}"
    if worst is None:
        what = "every module returns" if differing.rows else "what the function returns is"
        return f"{sides}: {what} the same"
    off = f"modules are up to {error_text(worst.error)} off (`{worst.label}`)"
    if differing.piled_up is None:
        return f"{sides}: rounding explains everything; {off}"
    phase, piled_up = differing.piled_up
    if phase == BACKWARD:
        off = f"gradients are up to {error_text(piled_up.largest)} off (`{piled_up.largest_at}`)"
    return f"{sides}: rounding explains every location, but accumulates; {off}"


def side_texts(differing: StepDifference) -> dict[str, str]:
    """Describe how each side computed, and its loss."""
    found = {}
    for name, side in (("a", differing.a), ("b", differing.b)):
        scale = "" if side.scale is None else f", loss scale {scale_text(side.scale)}"
        loss = "" if side.loss is None else f", loss {side.loss:.7g}"
        found[name] = f"{side.label} on {side.device}, unit roundoff {side.roundoff:.2g}{scale}{loss}"
    return found


def token_lines(differing: StepDifference) -> list[str]:
    """Describe how far the log-probabilities of the targets are apart, where that begins, and what removes it."""
    tokens = differing.tokens
    if tokens is None:
        return []
    if not tokens.rms:
        return [f"The log-probabilities of all {tokens.tokens:,} targets are equal."]
    noise = "" if not differing.token_noise else f"; between two runs of a RMS {number_text(differing.token_noise)}"
    lines = [
        f"Log-probabilities of {tokens.tokens:,} targets, b minus a: mean {number_text(tokens.mean)}, RMS "
        f"{number_text(tokens.rms)}, largest {number_text(tokens.largest)} (target {tokens.largest_at:,}); KL(a‖b) "
        f"{number_text(tokens.kl)} per target{noise}."
    ]
    if differing.starts_in is not None:
        row = differing.starts_in
        lines.append(f"The first module whose output differs is `{row.label}`, by {error_text(row.error)}.")
    helping = next((each for each in differing.remedies if each.helps), None)
    if helping is not None:
        lines.append(f"The cheapest way tried that removes most of it: {helping.text}.")
    elif differing.remedies:
        best = max(differing.remedies, key=lambda each: min(each.removed, each.removed_elsewhere))
        lines.append(f"Nothing that was tried removes {ENOUGH:.0%} of it; the most: {best.text}.")
    return lines


def remarks(differing: StepDifference) -> list[str]:
    """Describe how far apart the losses are, how errors grow along the depth, the noise, and what was not compared."""
    lines = []
    if differing.loss_error is not None:
        apart = f"The losses differ by {error_text(differing.loss_error)}."
        lines.append(apart if differing.loss_error else "The losses are equal.")
    lines += token_lines(differing)
    for phase, direction in DIRECTIONS.items():
        growth = differing.growth(phase)
        if growth is not None:
            pace = "" if growth.factor is None else f", ×{growth.factor:.3g} per module"
            lines.append(
                f"{direction}: {error_text(growth.first)} at the first of {growth.modules} modules that differ, "
                f"{error_text(growth.last)} at the last, at most {error_text(growth.largest)} "
                f"(`{growth.largest_at}`){pace}."
            )
    if differing.floor is None:
        lines.append("The noise of a was not measured.")
    elif not differing.floor:
        lines.append("Two runs of a are bitwise equal.")
    else:
        lines.append(f"Two runs of a differ by up to {error_text(differing.floor)} (`{differing.floor_at}`).")
    return [*lines, *differing.notes]
