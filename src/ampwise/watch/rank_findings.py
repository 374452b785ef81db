"""Findings that need the records of all ranks together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.runs.files import read_json, write_atomically
from ampwise.runs.findings_json import findings_data
from ampwise.runs.layout import FINDINGS, LARGEST_MANIFEST, MANIFEST
from ampwise.runs.reader import Run
from ampwise.watch.advice import is_cause, point_to_cause
from ampwise.watch.findings import Findings
from ampwise.watch.run_events import RunEvents

__all__ = ["FROM_ANOTHER_RANK", "add_findings_of_ranks"]

FROM_ANOTHER_RANK = "it came from another rank"  # one rank alone can only guess this


def add_findings_of_ranks(folder: Path) -> None:
    """Judge the record of a run that has ended, and write the findings to the first rank's part."""
    try:
        run = Run.read(folder, layers_of_others=False)
    except BadInput:  # no process was started
        return
    together = Findings()
    together.judge_whole(RunEvents(scales_by_rank=run.scales_by_rank()))
    causes = [seen for part in _parts(run) for seen in part.findings if is_cause(seen.finding)]
    for part in _parts(run):
        added = list(together) if part is run else []
        if point_to_cause(part.findings, known=bool(causes)) or added:
            _write(part.folder / FINDINGS, findings_data([*part.findings, *added]))
        _drop_guesses(part, {seen.finding.place.step for seen in causes})


def _parts(run: Run) -> list[Run]:
    return [run, *run.ranks.values()]


def _drop_guesses(part: Run, explained: Iterable[int | None]) -> None:
    """Remove guesses that a step's NaN came from another rank, where that rank's record explains the step."""
    sentences = part.facts.get("not_measured")
    if not isinstance(sentences, list):
        return
    left = [sentence for sentence in sentences if not _guesses(str(sentence), explained)]
    if len(left) < len(sentences):
        path = part.folder / MANIFEST
        manifest = read_json(path, LARGEST_MANIFEST)
        manifest["facts"]["not_measured"] = left
        _write(path, manifest)


def _guesses(sentence: str, steps: Iterable[int | None]) -> bool:
    step = re.match(r"Step (\d+) was replayed", sentence)
    return step is not None and FROM_ANOTHER_RANK in sentence and int(step[1]) in steps


def _write(path: Path, data: Any) -> None:
    write_atomically(path, [(json.dumps(data, indent=2, allow_nan=False) + "\n").encode()])
