"""Show which checkpoint a run would resume from, and why.

DIR is the directory that a Guard writes to. A run resumes from the newest intact checkpoint; one that is
damaged, or whose weights are not finite, is skipped. By default names, sizes and the manifest are checked;
--verify reads every file and compares checksums, as a run does before it resumes. Nothing is changed, and no
code in a checkpoint is run.

Examples:
  ampwise checkpoints checkpoints
  ampwise checkpoints checkpoints -v
  ampwise checkpoints checkpoints --verify
  ampwise checkpoints checkpoints --json | jq -r '.resume.step'

The exit code is 0 if there is a checkpoint to resume from, 1 if there is none, and 2 if DIR cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.cli import print_json
from ampwise.errors import BadInput
from ampwise.finding.terminal import printable, say
from ampwise.report.result_view import ResultTable, print_parts

if TYPE_CHECKING:
    from ampwise.guard.disk.catalog import SavedCheckpoint

GROUP = "Checkpoints"
LONGEST_PRECISION = 20
FIRST_TIME, LAST_TIME = 1, 2**33  # Unix times that can be shown as a date


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="the directory of the checkpoints")
    add("-v", "--verbose", action="store_true", help="list all checkpoints in a table")
    add("--verify", action="store_true", help="read all files and compare their checksums")
    add("--json", action="store_true", help="JSON, as `ampwise schema checkpoints` describes it")


def run(args: argparse.Namespace) -> int:
    from ampwise.guard.disk.catalog import checkpoints
    from ampwise.guard.disk.manifest import MANIFEST

    home = Path(args.directory)
    if not args.directory or not home.exists():
        raise BadInput(f"{args.directory!r}: no such folder. Name the directory that the Guard writes to.")
    found = checkpoints(home)
    if not found and (home / MANIFEST).exists():
        raise BadInput(
            f"{args.directory!r} is a single checkpoint. Name the folder above it: {str(home.resolve().parent)!r}."
        )
    if args.verify:
        found = [_verified(each) for each in found]
    chosen = next((each for each in found if not each.trouble), None)
    if args.json:
        resume = None if chosen is None else _data(chosen)
        print_json({"directory": args.directory, "resume": resume, "checkpoints": [_data(each) for each in found]})
        return 0 if chosen else 1
    if args.verbose and found:
        headings = ("name", "step", "saved", "size", "ranks", "precision", "state")
        rows = list(map(_cells, found))
        print_parts([ResultTable(headings=headings, rows=rows, left=range(7), wraps=(6,))])  # a reason may be long
    else:
        for each in found[: len(found) if chosen is None else found.index(chosen)]:
            say("Not from step {} ({}): {}", each.step, each.path.name, each.trouble, stream=sys.stdout)
    if chosen is None:
        undone = "all were rolled back" if found else "it has none"
        end = f"{undone}. A run would start from the beginning."
        if any(not each.undone for each in found):
            end = "all are damaged. A run would refuse to start: give it another directory."
        say("There is no checkpoint to resume from in {}: {}", args.directory, end, stream=sys.stdout)
        return 1
    _, _, saved, size, _, precision, state = _cells(chosen)
    facts = ", ".join(filter(None, (precision, size, saved, state)))
    say("A run would resume from step {} ({}): {}.", chosen.step, chosen.path, facts, stream=sys.stdout)
    return 0


def _verified(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """Verify a checkpoint's files; return it, marked as damaged if they do not match."""
    from ampwise.guard.disk.catalog import verify
    from ampwise.guard.disk.manifest import DamagedCheckpoint
    from ampwise.report.formatting import format_bytes

    if checkpoint.trouble:
        return checkpoint
    say("ampwise: reading {} ({})", checkpoint.path.name, format_bytes(checkpoint.bytes))
    try:
        verify(checkpoint)
    except DamagedCheckpoint as error:
        return dataclasses.replace(checkpoint, good=False, trouble=printable(str(error)))
    return checkpoint


def _cells(checkpoint: SavedCheckpoint) -> tuple[str, ...]:
    """Return the facts about a checkpoint; those that its manifest does not say are empty."""
    from ampwise.report.formatting import format_bytes

    state = "good" if checkpoint.good else "intact"
    if checkpoint.trouble:
        state = f"{'rolled back' if checkpoint.undone else 'damaged'}: {checkpoint.trouble}"
    is_dated, is_known = FIRST_TIME <= checkpoint.saved < LAST_TIME, checkpoint.number > 0
    return (
        printable(checkpoint.path.name),
        str(checkpoint.step),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.saved)) if is_dated else "",
        format_bytes(checkpoint.bytes) if is_known else "",
        str(checkpoint.world_size) if is_known else "",
        printable(str(checkpoint.about.get("precision") or ""))[:LONGEST_PRECISION],
        state,
    )


def _data(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    return {**dataclasses.asdict(checkpoint), "path": str(checkpoint.path)}
