"""Try assignments, each once, batch by batch, stopping when one can no longer pass; and keep the trials on disk."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ampwise.errors import AmpwiseError, BadInput
from ampwise.finding.strict_json import dumps
from ampwise.runs.files import read_json, write_atomically
from ampwise.trace.user_code import describe_error
from ampwise.tune.search.arrangement import FormatArrangement, FormatChoice, arrange_formats
from ampwise.tune.search.descent import Assignment
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Error, Fp32Reference
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.units import SearchUnit

WHAT = "progress of ampwise search"
VERSION = 1
LARGEST = 64_000_000  # bytes
BETWEEN_S = 1.0  # seconds between writes
SAME = 1e-3  # relative difference up to which numbers are equal: a GPU does not repeat a loss exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial(Fp32Error):
    """How far an assignment is from FP32. If stopped early, ``whole`` is False, and the error is a lower bound."""

    assignment: Assignment
    whole: bool = True
    problem: str | None = None  # why it failed to run

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SearchTrial:
        """Read what ``dataclasses.asdict`` returned, through JSON, where infinity is text."""
        numbers = {name: float(data[name]) for name in ("loss", "gradient")}
        assignment = tuple(int(place) for place in data["assignment"])
        return cls(**{**data, **numbers, "assignment": assignment})


class TrialsSpent(Exception):
    """The limit on trials is reached."""


class TrialStore:
    """A file of trials, from which an interrupted search continues, or none. A file of another search is refused."""

    def __init__(self, path: Path | None, fingerprint: Mapping[str, Any]) -> None:
        self._path, self._fingerprint = path, dict(fingerprint)
        self.trials: dict[tuple[str, Assignment], SearchTrial] = {}
        self._written_at = -math.inf
        if path is not None and path.exists():
            self._read(path)
        self.resumed = len(self.trials)

    def keep(self, stage: str, trial: SearchTrial) -> None:
        """Add a trial; it is on disk within a second."""
        self.trials[stage, trial.assignment] = trial
        if time.monotonic() - self._written_at >= BETWEEN_S:
            self.write()

    def write(self) -> None:
        """Write all trials, if there are any."""
        if self._path is None or not self.trials:
            return
        rows = [{"stage": stage, **asdict(trial)} for (stage, _), trial in self.trials.items()]
        data = {"what": WHAT, "version": VERSION, "search": self._fingerprint, "trials": rows}
        try:
            write_atomically(self._path, [dumps(data, indent=None).encode()])
        except OSError as error:
            raise BadInput(f"search(resume={str(self._path)!r}): cannot write it: {error.strerror}.") from error
        self._written_at = time.monotonic()

    def remove(self) -> None:
        """Remove the file when the search is over."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        name = f"search(resume={str(path)!r})"
        try:
            data = read_json(path, LARGEST)
            if not isinstance(data, dict) or data.get("what") != WHAT or data.get("version") != VERSION:
                raise ValueError(f"it is not {WHAT}, version {VERSION}")
            other = [part for part, value in self._fingerprint.items() if not _same(data["search"].get(part), value)]
            if not other:
                rows = [(str(row.pop("stage")), SearchTrial.from_dict(row)) for row in data["trials"]]
                self.trials = {(stage, trial.assignment): trial for stage, trial in rows}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"{name}: cannot resume from it: {error}. Name another file, or remove it.") from error
        if other:
            raise BadInput(
                f"{name}: it belongs to another search; these differ: {', '.join(other)}. Name another file, or remove "
                "it."
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME)
    return bool(one == other)


def digest_of(tree: Any) -> str:
    """Return a digest that is equal for equal tensors and values; an object that cannot be pickled equals itself."""
    leaves, structure = tree_flatten(tree)
    digest = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            plain = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
            digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            if plain.device.type != "meta" and plain.numel():
                values = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
                digest.update(values.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            digest.update(repr(leaf).encode())
        else:
            try:
                digest.update(pickle.dumps(leaf))
            except Exception:  # from the user's class: it may raise anything
                digest.update(repr(id(leaf)).encode())
        digest.update(b"\0")
    return digest.hexdigest()


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
        report: Callable[[str, SearchTrial], object],
        limit: float,
    ) -> None:
        self.stage, self.choices, self.batches, self.limit = stage, choices, batches, limit
        self._passes, self._units = passes, units
        self._reference, self._store, self._report = reference, store, report
        self._seen: dict[Assignment, SearchTrial] = {}

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

    def arranged(self, assignment: Assignment) -> FormatArrangement:
        """Arrange the formats of an assignment."""
        wide = [self.choices[-1]] * (len(self._units) - len(assignment))
        chosen = [*(self.choices[place] for place in assignment), *wide]
        return arrange_formats(self._units, chosen, self._passes.device)

    def _of(self, assignment: Assignment, tolerance: float) -> SearchTrial:
        seen = self._seen.get(assignment) or self._store.trials.get((self.stage, assignment))
        if seen is None or not (seen.whole or seen.error > tolerance):
            seen = self._tried(assignment, tolerance)
            self._store.keep(self.stage, seen)
        if assignment not in self._seen:
            self._report(self.stage, seen)
        self._seen[assignment] = seen
        return seen

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
        is_whole = tally.batches == len(self.batches)
        return SearchTrial(assignment=assignment, **asdict(tally.difference), whole=is_whole)
