"""What shows only when the parts of all ranks are seen together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.evidence.conduct import Conduct
from ampwise.record.files import read_json, write_aside
from ampwise.record.layout import FINDINGS, LARGEST_MANIFEST, MANIFEST
from ampwise.record.reader import Run
from ampwise.record.stored import findings_data
from ampwise.watch.advice import is_cause, point_to_cause
from ampwise.watch.findings import Findings

__all__ = ["FROM_ANOTHER", "add_findings_of_ranks"]

FROM_ANOTHER = "it came from another rank"  # what one rank can but guess


def add_findings_of_ranks(folder: Path) -> None:
    """Judge a record whose processes have ended, and write what is found to the first rank's part."""
    try:
        run = Run.read(folder, layers_of_others=False)
    except BadInput:  # nothing was started
        return
    together = Findings()
    together.judge_whole(Conduct(scales_by_rank=run.scales_by_rank()), "step")
    causes = [seen for part in _parts(run) for seen in part.findings if is_cause(seen.finding)]
    for part in _parts(run):
        added = list(together) if part is run else []
        if point_to_cause(part.findings, known=bool(causes)) or added:
            _write(part.folder / FINDINGS, findings_data([*part.findings, *added]))
        _drop_guesses(part, {seen.finding.place.step for seen in causes})


def _parts(run: Run) -> list[Run]:
    return [run, *run.ranks.values()]


def _drop_guesses(part: Run, explained: Iterable[int | None]) -> None:
    """That a step's NaN came from another rank: that one has said so itself."""
    told = part.facts.get("not_measured")
    if not isinstance(told, list):
        return
    left = [sentence for sentence in told if not _guesses(str(sentence), explained)]
    if len(left) < len(told):
        path = part.folder / MANIFEST
        manifest = read_json(path, LARGEST_MANIFEST)
        manifest["facts"]["not_measured"] = left
        _write(path, manifest)


def _guesses(sentence: str, steps: Iterable[int | None]) -> bool:
    step = re.match(r"Step (\d+) was replayed", sentence)
    return step is not None and FROM_ANOTHER in sentence and int(step[1]) in steps


def _write(path: Path, data: Any) -> None:
    write_aside(path, [(json.dumps(data, indent=2, allow_nan=False) + "\n").encode()])
