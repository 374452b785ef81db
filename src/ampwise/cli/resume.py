"""Say from which checkpoint a run would go on, and why not from a newer one.

DIR is the directory that a Guard writes to. A run goes on from the newest checkpoint that is whole; one that
is damaged, or whose weights are not finite, is passed over. By default names, sizes and the manifest are
looked at; --verify reads every file and compares checksums, as a run does before it goes on. Nothing is
changed, and nothing in a checkpoint is run.

Examples:
  ampwise resume checkpoints
  ampwise resume checkpoints --show
  ampwise resume checkpoints --verify
  ampwise resume checkpoints --json | jq -r '.resume.step'

The exit code is 0 if there is a checkpoint to go on from, 1 if there is none and 2 if DIR cannot be read.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ampwise.guard.disk.catalog import Checkpoint

__all__ = ["add_arguments", "run"]

LONGEST_PRECISION = 20
FIRST_MOMENT, LAST_MOMENT = 1, 2**33  # Unix times that a calendar has a date for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the directory of the checkpoints")
    parser.add_argument("--show", action="store_true", help="all checkpoints, in a table")
    parser.add_argument("--verify", action="store_true", help="read all files and compare their checksums")
    parser.add_argument("--json", action="store_true", help="all of it as a JSON object")


def run(args: argparse.Namespace) -> int:
    from ampwise.printers.terminal import say, write

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
            for line in _passed_over(found, chosen):
                say("{}", line, stream=sys.stdout)
        say("{}", _verdict(args.directory, found, chosen), stream=sys.stdout)
    return 0 if chosen else 1


def _found(directory: str) -> list[Checkpoint]:
    from pathlib import Path

    from ampwise.errors import BadInput
    from ampwise.guard.disk.catalog import checkpoints
    from ampwise.guard.disk.layout import MANIFEST

    home = Path(directory)
    if not directory or not home.exists():
        raise BadInput(f"{directory!r}: there is no such folder. Name the one that the Guard was given.")
    found = checkpoints(home)
    if not found and (home / MANIFEST).exists():
        raise BadInput(
            f"{directory!r} is a checkpoint itself. Name the folder above it: {str(home.resolve().parent)!r}."
        )
    return found


def _verified(checkpoint: Checkpoint) -> Checkpoint:
    """The same, with what its files have shown for trouble."""
    import dataclasses

    from ampwise.guard.disk.catalog import Damaged, verify
    from ampwise.printers.terminal import printable, say
    from ampwise.report.wording import size

    if checkpoint.trouble:
        return checkpoint
    say("ampwise: reading {} ({})", checkpoint.path.name, size(checkpoint.bytes))
    try:
        verify(checkpoint)
    except Damaged as error:
        return dataclasses.replace(checkpoint, good=False, trouble=printable(str(error)))
    return checkpoint


# --- for people ----------------------------------------------------------------------------------------------------


def _passed_over(found: Sequence[Checkpoint], chosen: Checkpoint | None) -> Iterator[str]:
    for each in found[: len(found) if chosen is None else found.index(chosen)]:
        yield f"Not from step {each.step} ({each.path.name}): {each.trouble}"


def _verdict(directory: str, found: Sequence[Checkpoint], chosen: Checkpoint | None) -> str:
    from ampwise.report.wording import size

    if chosen is None:
        nothing = f"There is nothing to go on from in {directory}"
        if any(not each.undone for each in found):
            return f"{nothing}: none of them is whole. A run would refuse to begin: name another directory for it."
        return f"{nothing}: {'all of them were undone' if found else 'there is no checkpoint'}. A run would begin anew."
    facts = ", ".join(filter(None, (_precision(chosen), size(chosen.bytes), _moment(chosen.saved), _state(chosen))))
    return f"A run would go on from step {chosen.step} ({chosen.path}): {facts}."


def _print_table(found: Sequence[Checkpoint]) -> None:
    from rich.text import Text

    from ampwise.printers.terminal import print_tables, printable, table
    from ampwise.report.wording import size

    columns = table("name", "step", "saved", "size", "ranks", "precision", "state")
    for each in found:
        known = each.number > 0
        cells = (
            printable(each.path.name),
            str(each.step),
            _moment(each.saved),
            size(each.bytes) if known else "",
            str(each.world_size) if known else "",
            _precision(each),
            _state(each),
        )
        columns.add_row(*(Text(cell) for cell in cells))  # a [bracket] in a name is no markup
    columns.columns[-1].no_wrap = False  # what is wrong with one may take two lines
    print_tables(lambda out: out.print(columns))


def _state(checkpoint: Checkpoint) -> str:
    if checkpoint.trouble:
        return f"{'undone' if checkpoint.undone else 'damaged'}: {checkpoint.trouble}"
    return "good" if checkpoint.good else "whole"


def _precision(checkpoint: Checkpoint) -> str:
    from ampwise.printers.terminal import printable

    return printable(str(checkpoint.about.get("precision") or ""))[:LONGEST_PRECISION]


def _moment(saved: float) -> str:
    import time

    known = FIRST_MOMENT <= saved < LAST_MOMENT
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)) if known else ""


# --- for programs --------------------------------------------------------------------------------------------------


def _as_json(directory: str, found: Sequence[Checkpoint], chosen: Checkpoint | None) -> str:
    from ampwise.strict_json import dumps

    return dumps(
        {
            "directory": directory,
            "resume": None if chosen is None else _data(chosen),
            "checkpoints": [_data(each) for each in found],
        }
    )


def _data(checkpoint: Checkpoint) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(checkpoint), "path": str(checkpoint.path)}
