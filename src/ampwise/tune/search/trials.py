"""Try assignments, each once, batch by batch, stopping when one can no longer pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ampwise.errors import AmpwiseError
from ampwise.trace.user_code import describe_error
from ampwise.tune.search.arrangement import FormatArrangement, arrange_formats
from ampwise.tune.search.descent import Assignment
from ampwise.tune.search.format_choices import FormatChoice
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.trial import SearchTrial
from ampwise.tune.search.trial_store import TrialStore
from ampwise.tune.search.units import SearchUnit

__all__ = ["TrialRunner", "TrialsSpent"]


class TrialsSpent(Exception):
    """The limit on trials is reached."""


class TrialRunner:
    """Trials on some batches, for one stage of the search.

    ``units`` beyond those of an assignment stay wide. ``limit`` bounds the number of trials.
    """

    def __init__(
        self,
        stage: str,
        passes: PassRunner,
        units: Sequence[SearchUnit],
        choices: Sequence[FormatChoice],
        reference: Fp32Reference,
        batches: Sequence[SearchBatch],
        store: TrialStore,
        report: Callable[[SearchTrial], object],
    ) -> None:
        self.stage, self.choices, self.batches = stage, choices, batches
        self._passes, self._units = passes, units
        self._reference, self._store, self._report = reference, store, report
        self._seen: dict[Assignment, SearchTrial] = {}
        self.limit: float = math.inf

    @property
    def count(self) -> int:
        """Number of assignments tried."""
        return len(self._seen)

    def passed(self, tolerance: float) -> list[Assignment]:
        """Return the tried assignments within the tolerance."""
        return [each for each, trial in self._seen.items() if trial.whole and trial.error <= tolerance]

    def of(self, assignment: Assignment, tolerance: float) -> SearchTrial:
        """Return the trial of an assignment; it may stop early once it exceeds the tolerance."""
        if assignment not in self._seen and self.count >= self.limit:
            raise TrialsSpent
        return self._of(assignment, tolerance)

    def whole(self, assignment: Assignment) -> SearchTrial:
        """Return the trial on all batches, regardless of error and limit."""
        return self._of(assignment, math.inf)

    def _of(self, assignment: Assignment, tolerance: float) -> SearchTrial:
        seen = self._seen.get(assignment) or self._store.trials.get((self.stage, assignment))
        if seen is None or not (seen.whole or seen.error > tolerance):
            seen = self._tried(assignment, tolerance)
            self._store.keep(self.stage, seen)
        if assignment not in self._seen:
            self._report(seen)
        self._seen[assignment] = seen
        return seen

    def arranged(self, assignment: Assignment) -> FormatArrangement:
        """Arrange the formats of an assignment."""
        return arrange_formats(self._units, self.chosen(assignment), self._passes.device)

    def chosen(self, assignment: Assignment) -> list[FormatChoice]:
        """Return the format of each unit."""
        wide = [self.choices[-1]] * (len(self._units) - len(assignment))
        return [*(self.choices[place] for place in assignment), *wide]

    def _tried(self, assignment: Assignment, tolerance: float) -> SearchTrial:
        tally, arrangement = ErrorTally(self._reference), self.arranged(assignment)
        for batch in self.batches:
            try:
                tally.add(self._passes.outcome(batch, arrangement))
            except (torch.OutOfMemoryError, AmpwiseError):
                raise
            except Exception as error:  # for example mixed dtypes
                self._passes.outcome(batch)  # raises if FP32 fails, too
                problem = describe_error(error)[:300]
                return SearchTrial(assignment=assignment, loss=math.inf, gradient=math.inf, worst=None, problem=problem)
            if tally.difference.error > tolerance:
                break
        found = tally.difference
        return SearchTrial(
            assignment=assignment,
            loss=found.loss,
            gradient=found.gradient,
            worst=found.worst,
            whole=tally.batches == len(self.batches),
        )
