"""What shows only when the parts of all ranks are seen together."""

from __future__ import annotations

import json
from pathlib import Path

from ampwise.errors import BadInput
from ampwise.evidence.conduct import Conduct
from ampwise.record.files import write_aside
from ampwise.record.layout import FINDINGS
from ampwise.record.reader import Run
from ampwise.record.stored import findings_data
from ampwise.watch.findings import Findings

__all__ = ["add_findings_of_ranks"]


def add_findings_of_ranks(folder: Path) -> None:
    """Judge a record whose processes have ended, and write what is found to the first rank's part."""
    try:
        run = Run.read(folder)
    except BadInput:  # nothing was started
        return
    together = Findings()
    together.judge_whole(Conduct(scales_by_rank=run.scales_by_rank()), "step")
    if len(together):
        data = findings_data([*run.findings, *together])
        write_aside(folder / FINDINGS, [(json.dumps(data, indent=2, allow_nan=False) + "\n").encode()])
