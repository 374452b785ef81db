"""Trying assignments: each once, on one batch after the other, and no longer than it can still pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ampwise.errors import AmpwiseError
from ampwise.tune.search.arrangement import Arrangement, arrangement_of
from ampwise.tune.search.choices import Choice
from ampwise.tune.search.descent import Assignment
from ampwise.tune.search.difference import Reference, Tally
from ampwise.tune.search.passes import Batch, Passes
from ampwise.tune.search.store import Store
from ampwise.tune.search.trial import Trial
from ampwise.tune.search.units import Unit
from ampwise.user_code import failure

__all__ = ["Spent", "Trials"]


class Spent(Exception):
    """There have been as many trials as were allowed."""


class Trials:
    """Trials on some batches, a stage of the search. ``units`` beyond those of an assignment stay wide. There may be
    ``limit`` of them, if that is set."""

    def __init__(
        self,
        stage: str,
        passes: Passes,
        units: Sequence[Unit],
        choices: Sequence[Choice],
        reference: Reference,
        batches: Sequence[Batch],
        store: Store,
        tell: Callable[[Trial], object],
    ) -> None:
        self.stage, self.choices, self.batches = stage, choices, batches
        self._passes, self._units = passes, units
        self._reference, self._store, self._tell = reference, store, tell
        self._seen: dict[Assignment, Trial] = {}
        self.limit: float = math.inf

    @property
    def count(self) -> int:
        """How many assignments were tried."""
        return len(self._seen)

    def passed(self, tolerance: float) -> list[Assignment]:
        """Those tried that are within it."""
        return [each for each, trial in self._seen.items() if trial.whole and trial.error <= tolerance]

    def of(self, assignment: Assignment, tolerance: float) -> Trial:
        """The trial of an assignment; it may be given up where it is beyond the tolerance."""
        if assignment not in self._seen and self.count >= self.limit:
            raise Spent
        return self._of(assignment, tolerance)

    def whole(self, assignment: Assignment) -> Trial:
        """On all batches, whatever it is, and however many there have been."""
        return self._of(assignment, math.inf)

    def _of(self, assignment: Assignment, tolerance: float) -> Trial:
        seen = self._seen.get(assignment) or self._store.trials.get((self.stage, assignment))
        if seen is None or not (seen.whole or seen.error > tolerance):
            seen = self._tried(assignment, tolerance)
            self._store.keep(self.stage, seen)
        if assignment not in self._seen:
            self._tell(seen)
        self._seen[assignment] = seen
        return seen

    def arranged(self, assignment: Assignment) -> Arrangement:
        """What runs how."""
        return arrangement_of(self._units, self.chosen(assignment), self._passes.device)

    def chosen(self, assignment: Assignment) -> list[Choice]:
        """The format of each unit."""
        wide = [self.choices[-1]] * (len(self._units) - len(assignment))
        return [*(self.choices[place] for place in assignment), *wide]

    def _tried(self, assignment: Assignment, tolerance: float) -> Trial:
        tally, arrangement = Tally(self._reference), self.arranged(assignment)
        for batch in self.batches:
            try:
                tally.add(self._passes.outcome(batch, arrangement))
            except (torch.OutOfMemoryError, AmpwiseError):
                raise
            except Exception as error:  # two types in one operation, say
                self._passes.outcome(batch)  # in FP32 it runs; if not, that is what is told
                problem = failure(error)[:300]
                return Trial(assignment=assignment, loss=math.inf, gradient=math.inf, worst=None, problem=problem)
            if tally.difference.error > tolerance:
                break
        found = tally.difference
        return Trial(
            assignment=assignment,
            loss=found.loss,
            gradient=found.gradient,
            worst=found.worst,
            whole=tally.batches == len(self.batches),
        )
