"""Why a module does not stand a format, by what its data shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampwise.census.algebra import Census
from ampwise.formats import BlockFormat, Format, find_format
from ampwise.report.wording import percent
from ampwise.tune.search.choices import Choice
from ampwise.tune.search.facts import Facts
from ampwise.tune.search.sensitivity import Local
from ampwise.tune.search.trial import Trial

__all__ = ["Reason", "amplification", "reasons_of", "usual_amplification"]

FLUSHED = 0.02  # of the values that are not zero
CANCELS = 4.0  # times as large as what is left
ILL_CONDITIONED = 1e4  # the largest singular value over the smallest
MOVES_LOGITS = 0.05  # which changes a probability by as much, relatively
AMPLIFIED = 4.0  # times the usual
SHORTER = 0.97
MOST = 2  # reasons that are told
ROLES = {"inputs": "its inputs", "weight": "its weights", "gradient": "the gradient that comes back to it"}


@dataclass(frozen=True, slots=True)
class Reason:
    """What the data shows; ``strength`` is how far beyond the ordinary."""

    kind: str
    text: str
    strength: float


def reasons_of(
    choice: Choice,
    facts: Facts | None,
    local: Local | None,
    condition: tuple[float, float] | None,
    usual: float | None,
    alone: Trial | None = None,
) -> tuple[Reason, ...]:
    """Why a module cannot have a format, the strongest reason first; never none. ``alone``: the whole with this format
    in this module only."""
    if facts is None or local is None:
        return (_of_the_whole(choice, alone) or Reason("whole", "measured only as a part of the whole", 0.0),)
    if choice.name not in facts.formats:
        return (Reason("fails", f"it does not run in {choice.name}: an operation of it has no such type", 0.0),)
    found = [*_range(choice, facts), *_sums(choice, facts), *_after(choice, facts, local, usual)]
    if condition is not None and condition[0] > ILL_CONDITIONED * condition[1]:
        text = f"its weight is ill-conditioned: singular values from {condition[0]:.2g} down to {condition[1]:.2g}"
        found.append(Reason("condition", text, math.log10(condition[0] / max(condition[1], 1e-30)) / 4))
    ordered = sorted(found, key=lambda reason: -reason.strength)
    return tuple(ordered[:MOST]) or (_of_the_whole(choice, alone) or _ordinary(choice, local),)


def amplification(local: Local) -> float | None:
    """How much of the loss of a row an error of its output moves, both relatively."""
    return math.sqrt(local.row / local.output) if local.output and math.isfinite(local.row) else None


def usual_amplification(locals_: Mapping[str, Local]) -> float | None:
    """Of the modules in the middle."""
    found = [value for local in locals_.values() if (value := amplification(local)) is not None]
    return statistics.median(found) if found else None


def _range(choice: Choice, facts: Facts) -> Iterator[Reason]:
    """What the format cannot hold."""
    for role, counted in facts.operands.items():
        fmt = _format(choice, is_gradient=role == "gradient")
        if fmt is None or not counted.nonzeros:
            continue
        scaled = choice.recipe is not None
        share = counted.flushed(fmt, _exponent(counted, fmt) if scaled else 0).low / counted.nonzeros
        if share >= FLUSHED:
            beside = f" beside the largest ({counted.amax:.2g})" if scaled else ""
            text = f"{percent(share)} of {ROLES[role]} are so small{beside} that {fmt.title} rounds them to zero"
            yield Reason("range", text, share / FLUSHED)
        if not scaled and counted.amax > fmt.max:
            yield Reason("range", f"{ROLES[role]} reach {counted.amax:.2g}, and {fmt.title} ends at {fmt.max:g}", 100.0)
    fmt = _format(choice, is_gradient=False)
    if choice.recipe is None and fmt is not None and facts.largest_output > fmt.max:
        yield Reason(
            "range", f"its output reaches {facts.largest_output:.2g}, and {fmt.title} ends at {fmt.max:g}", 100
        )


def _sums(choice: Choice, facts: Facts) -> Iterator[Reason]:
    if facts.cancellation is not None and facts.cancellation > CANCELS:
        times = f"{facts.cancellation:.0f}"
        text = f"its sums cancel: {times} times less is left of them than of terms of random sign, and all the rounding"
        yield Reason("cancellation", text, facts.cancellation / CANCELS)
    length = facts.formats[choice.name].length
    if length < SHORTER:
        blocks = choice.recipe is not None and choice.recipe.has_blocks
        why = ": a power of two as scale cuts off what is just below the next one" if blocks else ""
        text = f"what it passes back is {percent(1 - length)} too small{why}"
        yield Reason("shrinks", text, (1 - length) / (1 - SHORTER))


def _after(choice: Choice, facts: Facts, local: Local, usual: float | None) -> Iterator[Reason]:
    """What becomes of its output."""
    seen = facts.formats[choice.name]
    if facts.into_softmax and seen.moved > MOVES_LOGITS:
        text = f"its output goes into a softmax, and {choice.name} moves a logit by {seen.moved:.2g}"
        if seen.flipped:
            text += f": another one is the largest in {percent(seen.flipped)} of the rows"
        yield Reason("logits", text, seen.moved / MOVES_LOGITS)
    elif facts.into_softmax and seen.flipped:
        text = (
            f"its output goes into a softmax whose logits are close: with {choice.name} another one is the largest in "
            f"{percent(seen.flipped)} of the rows"
        )
        yield Reason("logits", text, 1 + seen.flipped)
    own = amplification(local)
    if own is not None and usual and own > AMPLIFIED * usual:
        text = (
            f"what follows amplifies it {own / usual:.2g} times as much as is usual here: a small temperature, or the "
            "difference of nearly equal values"
        )
        yield Reason("amplified", text, own / usual / AMPLIFIED)


def _of_the_whole(choice: Choice, alone: Trial | None) -> Reason | None:
    """What becomes worst where this module alone has the format."""
    if alone is None or not math.isfinite(alone.error) or not alone.error:
        return None
    what = "the loss"
    if alone.gradient > alone.loss:
        what = f"the gradient of {alone.worst}" if alone.worst else "the gradient of the model's own parameters"
    share = math.sqrt(2 * alone.gradient) if alone.gradient > alone.loss else alone.loss
    return Reason("whole", f"{choice.name} in it alone makes {what} {percent(share)} wrong", 0.0)


def _ordinary(choice: Choice, local: Local) -> Reason:
    worst = math.sqrt(max(local.output, local.gradient))
    text = f"nothing unusual: {choice.name} alone makes its output or its gradient {percent(worst)} wrong"
    return Reason("rounding", text, 0.0)


def _format(choice: Choice, *, is_gradient: bool) -> Format | BlockFormat | None:
    """What an operand has; None where it depends on a loss scale."""
    if choice.recipe is not None:
        return choice.recipe.backward if is_gradient else choice.recipe.forward
    fmt = find_format(choice.name)
    return None if is_gradient and fmt.needs_loss_scale else fmt


def _exponent(counted: Census, fmt: Format | BlockFormat) -> int:
    """Of the scale that puts the largest value at the end of the format."""
    return math.floor(math.log2(fmt.max / counted.amax)) if isinstance(fmt, Format) else 0
