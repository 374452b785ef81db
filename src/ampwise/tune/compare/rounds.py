"""Contenders that take turns: what slows the machine down for a while slows down all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

from ampwise.evidence.speed import Spread
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.timing import Clock

__all__ = ["Pace", "Times", "noise_of", "pace_for", "ratios", "take_rounds", "warm_up"]

WARM_UP = 3  # steps, the last of which says how long one takes
TURN_S = 0.1  # seconds that a turn is to last
MOST_STEPS = 50  # of a turn
WANTED_S = 30.0  # seconds for all rounds together, if that gives no fewer and no more rounds than these
DEVIATIONS = 3.0  # median ones, which make about two standard ones
FEWEST_ROUNDS, MOST_ROUNDS = 5, 15

Times = dict[str, list[float]]  # by label, the seconds of a step in each round


class Pace(NamedTuple):
    """How many rounds, and how many steps each contender's turn has."""

    rounds: int
    steps: Mapping[str, int]


def warm_up(
    lineup: Lineup, clock: Clock, told: Callable[[str], object], after: Callable[[Contender], object]
) -> dict[str, float]:
    """First steps: kernels are chosen, memory is taken, code is compiled. About how long a step takes, by label.

    ``after`` is called with each that has taken them, and may drop it.
    """
    seconds: dict[str, float] = {}
    for contender in lineup:

        def first_steps(one: Contender = contender) -> float:
            for _ in range(WARM_UP - 1):
                one()
            return clock(one, 1)

        taken = lineup.attempt(contender, first_steps)
        if taken is not None:
            seconds[contender.label] = taken
            after(contender)
        told(contender.label)
    return {label: each for label, each in seconds.items() if label not in lineup.problems}


def pace_for(seconds: Mapping[str, float], rounds: int | None = None, steps: int | None = None) -> Pace:
    """What was asked for; else short turns, and as many rounds as fit into half a minute.

    >>> pace_for({"fp32": 0.02, "bf16": 0.01})
    Pace(rounds=15, steps={'fp32': 5, 'bf16': 10})
    >>> pace_for({"fp32": 4.0}, steps=2)
    Pace(rounds=5, steps={'fp32': 2})
    """
    turns = {
        label: steps or min(MOST_STEPS, max(1, round(TURN_S / max(each, 1e-6)))) for label, each in seconds.items()
    }
    whole = sum((turns[label] + 1) * each for label, each in seconds.items())
    fitting = int(WANTED_S / whole) if whole > 0 else MOST_ROUNDS
    return Pace(rounds or min(MOST_ROUNDS, max(FEWEST_ROUNDS, fitting)), turns)


def take_rounds(
    lineup: Lineup, clock: Clock, pace: Pace, told: Callable[[str], object], after_turn: Callable[[], object]
) -> Times:
    """In each round all of them, in the other order than in the round before. A turn begins with a step that is not
    timed. One that fails has no times."""
    times: Times = {contender.label: [] for contender in lineup}
    for number in range(pace.rounds):
        order = list(lineup)
        for contender in reversed(order) if number % 2 else order:

            def turn(one: Contender = contender) -> float:
                one.uncounted()
                taken = clock(one, pace.steps[one.label])
                after_turn()
                return taken

            seconds = lineup.attempt(contender, turn)
            if seconds is not None:
                times[contender.label].append(seconds)
            told(contender.label)
    return {label: taken for label, taken in times.items() if label not in lineup.problems}


def ratios(times: Times, of: str, to: str) -> Spread | None:
    """How many times as fast as ``to``, ``of`` is, by rounds; None where one of them has no times."""
    if of not in times or to not in times:
        return None
    return Spread.of([base / own for own, base in zip(times[of], times[to], strict=True)])


def noise_of(times: Times, one: str, again: str) -> float | None:
    """How far from 1 the ratio of two runs of the same is, with three times its median deviation from round to round.

    A round in which something else held up the machine does not count for more than any other.

    >>> round(noise_of({"fp32": [1.0, 1.0, 1.0], "again": [1.01, 1.01, 7.0]}, "fp32", "again"), 3)
    0.01
    """
    if one not in times or again not in times:
        return None
    # In logarithms, so that twice as slow is as far as twice as fast.
    logs = [math.log(other / own) for own, other in zip(times[one], times[again], strict=True)]
    middle = median(logs)
    return math.expm1(abs(middle) + DEVIATIONS * median(abs(each - middle) for each in logs))
