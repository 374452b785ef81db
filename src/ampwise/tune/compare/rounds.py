"""Run contenders in turns, so that whatever slows the machine for a while slows all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

from ampwise.tune.compare.clocks import Clock
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.lineup import Lineup
from ampwise.tune.compare.speeds import TimeSpread

__all__ = ["RoundPlan", "Times", "noise_between", "plan_rounds", "ratios", "run_rounds", "warm_up"]

WARM_UP = 3  # steps; the last one is timed
TURN_S = 0.1  # seconds of a turn
MOST_STEPS = 50  # steps of a turn
WANTED_S = 30.0  # seconds for all rounds together, within the limits below
DEVIATIONS = 3.0  # median deviations, about two standard deviations
FEWEST_ROUNDS, MOST_ROUNDS = 5, 15

Times = dict[str, list[float]]  # seconds of a step in each round, by label


class RoundPlan(NamedTuple):
    """How many rounds to run, and how many steps each contender's turn has."""

    rounds: int
    steps: Mapping[str, int]


def warm_up(
    lineup: Lineup, clock: Clock, report: Callable[[str], object], after: Callable[[Contender], object]
) -> dict[str, float]:
    """Run first steps, which choose kernels, allocate memory and compile; return a rough time of a step, by label.

    ``after`` is called with each contender that has run them, and may drop it.
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
        report(contender.label)
    return {label: each for label, each in seconds.items() if label not in lineup.problems}


def plan_rounds(seconds: Mapping[str, float], rounds: int | None = None, steps: int | None = None) -> RoundPlan:
    """Return the given rounds and steps; else short turns, and as many rounds as fit into half a minute.

    >>> plan_rounds({"fp32": 0.02, "bf16": 0.01})
    RoundPlan(rounds=15, steps={'fp32': 5, 'bf16': 10})
    >>> plan_rounds({"fp32": 4.0}, steps=2)
    RoundPlan(rounds=5, steps={'fp32': 2})
    """
    turns = {
        label: steps or min(MOST_STEPS, max(1, round(TURN_S / max(each, 1e-6)))) for label, each in seconds.items()
    }
    whole = sum((turns[label] + 1) * each for label, each in seconds.items())
    fitting = int(WANTED_S / whole) if whole > 0 else MOST_ROUNDS
    return RoundPlan(rounds or min(MOST_ROUNDS, max(FEWEST_ROUNDS, fitting)), turns)


def run_rounds(
    lineup: Lineup, clock: Clock, pace: RoundPlan, report: Callable[[str], object], after_turn: Callable[[], object]
) -> Times:
    """Return the times of all rounds. Each round runs every contender, in the reverse order of the round before.

    A turn begins with a step that is not timed. A contender that fails has no times.
    """
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
            report(contender.label)
    return {label: taken for label, taken in times.items() if label not in lineup.problems}


def ratios(times: Times, of: str, to: str) -> TimeSpread | None:
    """Return how many times as fast ``of`` is as ``to``, over the rounds; None where one of them has no times."""
    if of not in times or to not in times:
        return None
    return TimeSpread.of([base / own for own, base in zip(times[of], times[to], strict=True)])


def noise_between(times: Times, one: str, again: str) -> float | None:
    """Return how far the ratio of two equal runs is from 1, plus three times its median deviation over the rounds.

    A round in which something else slowed the machine does not count more than any other.

    >>> round(noise_between({"fp32": [1.0, 1.0, 1.0], "again": [1.01, 1.01, 7.0]}, "fp32", "again"), 3)
    0.01
    """
    if one not in times or again not in times:
        return None
    # In logarithms, so that twice as slow is as far as twice as fast.
    logs = [math.log(other / own) for own, other in zip(times[one], times[again], strict=True)]
    middle = median(logs)
    return math.expm1(abs(middle) + DEVIATIONS * median(abs(each - middle) for each in logs))
