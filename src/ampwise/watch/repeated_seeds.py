"""Seeds that are set again during the training, so that it goes on with random numbers that it has had."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from ampwise.finding.call_site import CallSite
from ampwise.watch.learning import CountedCalls, Learning

__all__ = ["RepeatedSeeds"]

MOST_LINES = 16
MOST_TIMES = 6  # that are looked at


@dataclass(slots=True)
class _Seed:
    """A line that sets a seed, and the generator's states after the two steps that follow."""

    value: Any
    times: int = 0
    states: list[bytes] = field(default_factory=list)  # of the last time
    before: list[bytes] = field(default_factory=list)  # of the time before


class RepeatedSeeds:
    """Compare the states of torch's generator after a seed was set: equal ones mean equal random numbers."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._seeds: dict[CallSite, _Seed] = {}
        self._last: CallSite | None = None  # the line that set the seed last
        self._evaluates = False  # a model ran without gradients since

    def seeded(self, site: CallSite, value: Any, steps: int) -> bool:
        """Note a seed. Return whether the next steps are to be followed."""
        if not isinstance(value, int) or not steps or (len(self._seeds) >= MOST_LINES and site not in self._seeds):
            self._last = None
            return False
        known = self._seeds.get(site)
        if known is None or known.value != value:
            known = self._seeds[site] = _Seed(value)
        known.times, known.before, known.states = known.times + 1, known.states, []
        self._last, self._evaluates = site, False
        return known.times <= MOST_TIMES

    def evaluates(self) -> None:
        """Note that a model ran without gradients."""
        self._evaluates = True

    def step_over(self, steps: int) -> None:
        """Look at the generator after a step, if a seed was set before it."""
        known = None if self._last is None else self._seeds[self._last]
        if known is None or known.times > MOST_TIMES or len(known.states) >= 2:
            return
        known.states.append(_state())
        is_same = known.states == known.before[: len(known.states)]
        # Random numbers were drawn between the two steps, or in the only one, and not by an evaluation.
        draws = known.states[0] != known.states[1] if len(known.states) == 2 else self._draws_in_first(known)
        if is_same and draws:
            found = self._facts.reseeded.setdefault(self._last, CountedCalls(step=steps, what=str(known.value)))  # type: ignore[arg-type]
            found.times += 1

    def _draws_in_first(self, known: _Seed) -> bool:
        """Whether the only step between two seeds has drawn random numbers."""
        if self._evaluates or len(known.before) != 1:
            return False
        fresh = torch.Generator().manual_seed(known.value).get_state()
        return known.states[0] != hashlib.sha1(fresh.numpy().tobytes(), usedforsecurity=False).digest()


def _state() -> bytes:
    return hashlib.sha1(torch.default_generator.get_state().numpy().tobytes(), usedforsecurity=False).digest()
