"""Explain from measurements why a module does not tolerate a format."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ampwise.numbers.formats import BlockFormat, Format, find_format
from ampwise.report.formatting import format_percent
from ampwise.tune.search.arrangement import FormatChoice
from ampwise.tune.search.sensitivity import LocalError, UnitFacts
from ampwise.tune.search.trials import SearchTrial

FLUSHED = 0.02  # share of the nonzero values
CANCELS = 4.0  # times larger than the result
ILL_CONDITIONED = 1e4  # the largest singular value over the smallest
MOVES_LOGITS = 0.05  # changes a probability by this much, relatively
AMPLIFIED = 4.0  # times the typical
SHORTER = 0.97
MOST = 2  # reasons shown
ROLES = {"inputs": "its inputs", "weight": "its weights", "gradient": "the gradient of its output"}


@dataclass(frozen=True, slots=True)
class SensitivityReason:
    """An observation; ``strength`` is how far it exceeds the ordinary."""

    kind: str
    text: str
    strength: float


def find_reasons(
    choice: FormatChoice,
    facts: UnitFacts | None,
    local: LocalError | None,
    condition: tuple[float, float] | None,
    usual: float | None,
    alone: SearchTrial | None = None,
) -> list[SensitivityReason]:
    """Return why a module cannot have a format, strongest reason first; at least one.

    ``alone`` is the trial with this format in this module only.
    """
    whole = _of_the_whole(choice, alone)
    if facts is None or local is None:
        return [whole or SensitivityReason("whole", "measured only as part of the whole", 0.0)]
    if choice.name not in facts.formats:
        text = f"it does not run in {choice.name}: one of its operations lacks that dtype"
        return [SensitivityReason("fails", text, 0.0)]
    found = [*_range(choice, facts), *_effects(choice, facts, local, usual)]
    if condition is not None and condition[0] > ILL_CONDITIONED * condition[1]:
        text = f"its weight is ill-conditioned: singular values from {condition[0]:.2g} down to {condition[1]:.2g}"
        found.append(SensitivityReason("condition", text, math.log10(condition[0] / max(condition[1], 1e-30)) / 4))
    if found:
        return sorted(found, key=lambda reason: -reason.strength)[:MOST]
    worst = format_percent(math.sqrt(max(local.output, local.gradient)))
    text = f"nothing unusual: {choice.name} makes its own output or gradient {worst} wrong"
    return [whole or SensitivityReason("rounding", text, 0.0)]


def amplification(local: LocalError) -> float | None:
    """Return how much the loss of a row moves for an error of the output, both relative."""
    return math.sqrt(local.row / local.output) if local.output and math.isfinite(local.row) else None


def usual_amplification(locals_: Iterable[LocalError]) -> float | None:
    """Return the median over the modules."""
    found = [value for local in locals_ if (value := amplification(local)) is not None]
    return statistics.median(found) if found else None


def _range(choice: FormatChoice, facts: UnitFacts) -> Iterator[SensitivityReason]:
    """Yield what the format cannot represent."""
    for role, counted in facts.operands.items():
        fmt = _format(choice, is_gradient=role == "gradient")
        if fmt is None or not counted.nonzeros:
            continue
        scaled, exponent = choice.recipe is not None, 0
        if scaled and isinstance(fmt, Format):  # the scale maps the largest value to the format's maximum
            exponent = math.floor(math.log2(fmt.max / counted.amax))
        share = counted.flushed(fmt, exponent).low / counted.nonzeros
        if share >= FLUSHED:
            beside = f" relative to the largest ({counted.amax:.2g})" if scaled else ""
            text = f"{format_percent(share)} of {ROLES[role]} are so small{beside} that {fmt.title} rounds them to zero"
            yield SensitivityReason("range", text, share / FLUSHED)
        if not scaled and counted.amax > fmt.max:
            yield SensitivityReason(
                "range", f"{ROLES[role]} reach {counted.amax:.2g}; {fmt.title} ends at {fmt.max:g}", 100.0
            )
    fmt = _format(choice, is_gradient=False)
    if choice.recipe is None and fmt is not None and facts.largest_output > fmt.max:
        yield SensitivityReason(
            "range", f"its output reaches {facts.largest_output:.2g}; {fmt.title} ends at {fmt.max:g}", 100
        )


def _effects(
    choice: FormatChoice, facts: UnitFacts, local: LocalError, usual: float | None
) -> Iterator[SensitivityReason]:
    """Yield what happens in its sums, to its gradient, and to its output."""
    seen = facts.formats[choice.name]
    if facts.cancellation is not None and facts.cancellation > CANCELS:
        times = f"{facts.cancellation:.0f}"
        text = f"its sums cancel: the result is {times} times smaller than with random signs, but rounding errors stay"
        yield SensitivityReason("cancellation", text, facts.cancellation / CANCELS)
    if seen.length < SHORTER:
        blocks = choice.recipe is not None and choice.recipe.has_blocks
        why = ": power-of-two scales clip values just below the next power" if blocks else ""
        text = f"the gradient it passes back is {format_percent(1 - seen.length)} too small{why}"
        yield SensitivityReason("shrinks", text, (1 - seen.length) / (1 - SHORTER))
    flips = format_percent(seen.flipped)
    if facts.into_softmax and seen.moved > MOVES_LOGITS:
        text = f"its output goes into a softmax, and {choice.name} moves a logit by {seen.moved:.2g}"
        text += f", changing the largest one in {flips} of the rows" if seen.flipped else ""
        yield SensitivityReason("logits", text, seen.moved / MOVES_LOGITS)
    elif facts.into_softmax and seen.flipped:
        text = "its output goes into a softmax with close logits"
        text += f": {choice.name} changes the largest one in {flips} of the rows"
        yield SensitivityReason("logits", text, 1 + seen.flipped)
    own = amplification(local)
    if own is not None and usual and own > AMPLIFIED * usual:
        text = (
            f"later layers amplify its errors {own / usual:.2g} times as much as is typical here: a small temperature, "
            "or a difference of nearly equal values"
        )
        yield SensitivityReason("amplified", text, own / usual / AMPLIFIED)


def _of_the_whole(choice: FormatChoice, alone: SearchTrial | None) -> SensitivityReason | None:
    """Say what becomes worst when only this module has the format."""
    if alone is None or not math.isfinite(alone.error) or not alone.error:
        return None
    what = "the loss"
    if alone.gradient > alone.loss:
        what = f"the gradient of {alone.worst}" if alone.worst else "the gradient of the model's own parameters"
    share = math.sqrt(2 * alone.gradient) if alone.gradient > alone.loss else alone.loss
    return SensitivityReason(
        "whole", f"{choice.name} in this module alone makes {what} {format_percent(share)} wrong", 0.0
    )


def _format(choice: FormatChoice, *, is_gradient: bool) -> Format | BlockFormat | None:
    """Return the format of an operand; None if it depends on a loss scale."""
    if choice.recipe is not None:
        return choice.recipe.backward if is_gradient else choice.recipe.forward
    fmt = find_format(choice.name)
    return None if is_gradient and fmt.needs_loss_scale else fmt
