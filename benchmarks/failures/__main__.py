"""The zoo of failures: ``python -m benchmarks.failures [NAMES…] [--others]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from ampwise.errors import BadInput
from ampwise.finding import Finding
from benchmarks.failures.case import Program, named
from benchmarks.failures.score import Score, score, totals, traces
from benchmarks.harness import Result, note

COLUMNS = ["program", "guilty", "ampwise", "ampwise.trace", "detect_anomaly", "forward hooks"]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        programs = named(asked.names)
    except BadInput as error:
        sys.exit(f"benchmarks.failures: {error}")
    if not traces():
        sys.exit("benchmarks.failures: this ampwise does not trace: Engine.findings and ampwise.trace are missing.")
    with torch.device(asked.device):
        scores = list(_scored(programs, others=asked.others or not asked.names))
    reached = totals(scores)
    result = Result(
        name="failures" if asked.device == "cpu" else f"failures_{asked.device}",
        title="Which operation went bad first: programs that fail as real ones did",
        claim="Of each failing program, whether the guilty line and the kind of failure are named; healthy programs "
        "that look suspicious are to be met with silence.",
        columns=COLUMNS,
        rows=[row(each) for each in scores],
        notes=[str(reached), *_of_others(scores), *_reading()],
    )
    if asked.names:
        _show(result)
    else:
        result.publish()
    return 0 if reached.reach_the_aim else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description="Score the tracer on the zoo.")
    parser.add_argument("names", nargs="*", help="only these programs; then nothing is published")
    parser.add_argument("--device", default="cpu", help="where all of it is made and run (default: cpu)")
    parser.add_argument("--others", action="store_true", help="ask other tools too, as is done for the whole zoo")
    return parser


def _scored(programs: Iterable[Program], *, others: bool) -> Iterator[Score]:
    for program in programs:
        note(program.name)
        yield score(program, others=others)


def row(of: Score) -> list[str | float]:
    """A program's line of the table."""
    label = of.program.label
    guilty = "healthy" if label is None else f"{label.line} {label.kind}"
    direct = "" if of.found_directly is None else _told(of.program, of.found_directly)
    others = [str(of.others[name]) if name in of.others else "" for name in COLUMNS[-2:]]
    return [of.program.name, guilty, _told(of.program, of.found), direct, *others]


def _told(program: Program, findings: Sequence[Finding]) -> str:
    """What was found, a tick where it is right and the only thing."""
    said = list(dict.fromkeys(f"{each.place.line or '?'} {each.rule.name}" for each in findings))
    if program.label is None:
        return ", ".join(said) or "silent ✓"
    return "✓" if said == [f"{program.label.line} {program.label.kind}"] else ", ".join(said) or "nothing"


def _of_others(scores: Sequence[Score]) -> Iterator[str]:
    for name in COLUMNS[-2:]:
        said = [(each.program.label is None, each.others[name]) for each in scores if name in each.others]
        if said:
            failing = [each for is_healthy, each in said if not is_healthy]
            alarms = sum(each.spoke for is_healthy, each in said if is_healthy)
            yield (
                f"{name}: speaks in {sum(each.spoke for each in failing)} of {len(failing)} failing programs, is right "
                f"in {sum(each.right for each in failing)}; {alarms} false alarms in {len(said) - len(failing)}."
            )


def _reading() -> list[str]:
    return [
        "✓: the guilty line and its kind, and nothing else. detect_anomaly is right where it names the guilty line; "
        "forward hooks, which know no lines, where it is in the module they name or, for one of torch's own, in that "
        "around it. Both are run in a loop by hand with autocast and GradScaler.",
        "The programs, with the threads that tell of their like, are in benchmarks/failures.",
    ]


def _show(result: Result) -> None:
    table = Table(*result.columns)
    for cells in result.rows:
        table.add_row(*map(str, cells))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for each in result.notes[:-2]:
        console.print(f"- {each}")


if __name__ == "__main__":
    sys.exit(main())
