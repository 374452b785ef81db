"""Show which checkpoint a run would resume from, and why not from a newer one.

DIR is the directory that a Guard writes to. A run resumes from the newest intact checkpoint; one that is
damaged, or whose weights are not finite, is skipped. By default names, sizes and the manifest are checked;
--verify reads every file and compares checksums, as a run does before it resumes. Nothing is changed, and no
code in a checkpoint is run.

Examples:
  ampwise resume checkpoints
  ampwise resume checkpoints --show
  ampwise resume checkpoints --verify
  ampwise resume checkpoints --json | jq -r '.resume.step'

The exit code is 0 if there is a checkpoint to resume from, 1 if there is none, and 2 if DIR cannot be read.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ampwise.guard.disk.catalog import SavedCheckpoint

__all__ = ["add_arguments", "run"]

LONGEST_PRECISION = 20
FIRST_TIME, LAST_TIME = 1, 2**33  # Unix times that can be shown as a date


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the directory of the checkpoints")
    parser.add_argument("--show", action="store_true", help="list all checkpoints in a table")
    parser.add_argument("--verify", action="store_true", help="read all files and compare their checksums")
    parser.add_argument("--json", action="store_true", help="a JSON object with all checkpoints")


def run(args: argparse.Namespace) -> int:
    from ampwise.finding.terminal import say, write

    found = _found(args.directory)
    if args.verify:
        found = [_verified(each) for each in found]
    chosen = next((each for each in found if not each.trouble), None)
    if args.json:
        write(_as_json(args.directory, found, chosen), sys.stdout)
    else:
        if args.show and found:
            _print_table(found)
        else:
            for line in _skipped(found, chosen):
                say("{}", line, stream=sys.stdout)
        say("{}", _verdict(args.directory, found, chosen), stream=sys.stdout)
    return 0 if chosen else 1


def _found(directory: str) -> list[SavedCheckpoint]:
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.guard.disk.catalog import checkpoints
    from ampwise.guard.disk.layout import MANIFEST

    home = Path(directory)
    if not directory or not home.exists():
        raise BadInput(f"{directory!r}: no such folder. Name the directory that the Guard writes to.")
    found = checkpoints(home)
    if not found and (home / MANIFEST).exists():
        raise BadInput(
            f"{directory!r} is a single checkpoint. Name the folder above it: {str(home.resolve().parent)!r}."
        )
    return found


def _verified(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """Verify a checkpoint's files; return it, marked as damaged if they do not match."""
    import dataclasses

    from ampwise.finding.terminal import printable, say
    from ampwise.guard.disk.catalog import DamagedCheckpoint, verify
    from ampwise.report.formatting import format_bytes

    if checkpoint.trouble:
        return checkpoint
    say("ampwise: reading {} ({})", checkpoint.path.name, format_bytes(checkpoint.bytes))
    try:
        verify(checkpoint)
    except DamagedCheckpoint as error:
        return dataclasses.replace(checkpoint, good=False, trouble=printable(str(error)))
    return checkpoint


# --- for people ----------------------------------------------------------------------------------------------------


def _skipped(found: Sequence[SavedCheckpoint], chosen: SavedCheckpoint | None) -> Iterator[str]:
    for each in found[: len(found) if chosen is None else found.index(chosen)]:
        yield f"Not from step {each.step} ({each.path.name}): {each.trouble}"


def _verdict(directory: str, found: Sequence[SavedCheckpoint], chosen: SavedCheckpoint | None) -> str:
    from ampwise.report.formatting import format_bytes

    if chosen is None:
        nothing = f"There is no checkpoint to resume from in {directory}"
        if any(not each.undone for each in found):
            return f"{nothing}: all are damaged. A run would refuse to start: give it another directory."
        return f"{nothing}: {'all were rolled back' if found else 'it is empty'}. A run would start from the beginning."
    facts = ", ".join(
        filter(None, (_precision(chosen), format_bytes(chosen.bytes), _time(chosen.saved), _state(chosen)))
    )
    return f"A run would resume from step {chosen.step} ({chosen.path}): {facts}."


def _print_table(found: Sequence[SavedCheckpoint]) -> None:
    from rich.text import Text

    from ampwise.finding.terminal import print_tables, printable, table
    from ampwise.report.formatting import format_bytes

    columns = table("name", "step", "saved", "size", "ranks", "precision", "state")
    for each in found:
        known = each.number > 0
        cells = (
            printable(each.path.name),
            str(each.step),
            _time(each.saved),
            format_bytes(each.bytes) if known else "",
            str(each.world_size) if known else "",
            _precision(each),
            _state(each),
        )
        columns.add_row(*(Text(cell) for cell in cells))  # Text: a [bracket] in a name is not markup
    columns.columns[-1].no_wrap = False  # a reason may take two lines
    print_tables(lambda out: out.print(columns))


def _state(checkpoint: SavedCheckpoint) -> str:
    if checkpoint.trouble:
        return f"{'rolled back' if checkpoint.undone else 'damaged'}: {checkpoint.trouble}"
    return "good" if checkpoint.good else "intact"


def _precision(checkpoint: SavedCheckpoint) -> str:
    from ampwise.finding.terminal import printable

    return printable(str(checkpoint.about.get("precision") or ""))[:LONGEST_PRECISION]


def _time(saved: float) -> str:
    import time

    known = FIRST_TIME <= saved < LAST_TIME
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)) if known else ""


# --- for programs --------------------------------------------------------------------------------------------------


def _as_json(directory: str, found: Sequence[SavedCheckpoint], chosen: SavedCheckpoint | None) -> str:
    from ampwise.finding.strict_json import dumps

    return dumps(
        {
            "directory": directory,
            "resume": None if chosen is None else _data(chosen),
            "checkpoints": [_data(each) for each in found],
        }
    )


def _data(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(checkpoint), "path": str(checkpoint.path)}
