"""Keep trials on disk, so that an interrupted search can continue."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps
from ampwise.runs.files import read_json, write_atomically
from ampwise.tune.search.descent import Assignment
from ampwise.tune.search.trial import SearchTrial

__all__ = ["TrialStore"]

WHAT = "progress of ampwise search"
VERSION = 1
LARGEST = 64_000_000  # bytes
BETWEEN_S = 1.0  # seconds between writes
SAME = 1e-3  # relative difference up to which numbers are equal: a GPU does not repeat a loss exactly


class TrialStore:
    """A file of trials, or none. A file of another search is refused."""

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
        rows = [{"stage": stage, **trial.as_dict()} for (stage, _), trial in self.trials.items()]
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
