"""Evaluate a coding agent: python -m evals --agent COMMAND; docs/evals.md explains the scenarios and the grades."""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path

import ampwise
from ampwise.errors import AmpwiseError, BadInput
from ampwise.report.page.page_file import check_page_path, write_page
from evals.agents import BUILT_IN, command_of
from evals.page import as_page
from evals.scenarios import chosen
from evals.trials import SKILL, Trial, as_text, run_trials, write_json

WITH = {"both": (False, True), "with": (True,), "without": (False,)}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evals", description=__doc__)
    add = parser.add_argument
    add("--agent", help=f"a command that reads a prompt on stdin and prints an answer; or {', '.join(BUILT_IN)}")
    add("--skill", choices=WITH, default="both", help="ask with the skill, without it, or both (the default)")
    add("-n", "--times", type=int, default=1, help="how often each question is asked (1)")
    add("--timeout", type=float, default=300, help="seconds for an answer (300)")
    add("--jobs", type=int, default=1, help="how many agents run at once (1)")
    add("--list", action="store_true", help="list the scenarios, and stop")
    add("-o", "--output", type=Path, help="a folder for results.json and page.html")
    add("-f", "--force", action="store_true", help="overwrite a page.html that is not ours")
    add("scenarios", nargs="*", help="ids or groups of scenarios; all by default")
    return parser


def main(words: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 once all were asked, whatever they answered, and 2 for bad input."""
    args = parser().parse_args(words)
    try:
        return _run(args)
    except AmpwiseError as error:
        print(f"evals: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    scenarios = chosen(args.scenarios)
    if args.list:
        for each in scenarios:
            print(f"{each.group}/{each.id}: {', '.join(each.pressures) or 'no pressure'}")
        return 0
    if args.agent is None:
        raise BadInput(f"--agent: expected a command that reads a prompt on stdin, or {' or '.join(BUILT_IN)}.")
    if min(args.times, args.jobs) < 1 or not args.timeout > 0:
        raise BadInput("--times, --jobs and --timeout: expected numbers above zero.")
    command = command_of(args.agent)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        check_page_path(args.output / "page.html", force=args.force)

    def report(trial: Trial) -> None:
        why = "" if trial.passed else "; ".join(f"{mark.what}: {mark.why}" for mark in trial.marks if not mark.ok)
        verdict = "passed" if trial.passed else "unclear: " if trial.unclear else "failed: "
        print(f"{trial.scenario}, {SKILL[trial.skill]}: {verdict}{why[:150]}", file=sys.stderr)

    trials = run_trials(
        command, scenarios, skills=WITH[args.skill], times=args.times, seconds=args.timeout, jobs=args.jobs,
        report=report,
    )  # fmt: skip
    print(as_text(trials), end="")
    if args.output is not None:
        about = {
            "agent": args.agent, "date": date.today().isoformat(), "ampwise": ampwise.__version__, "times": args.times,
            "command": f"python -m evals --agent {args.agent!r} --skill {args.skill} -n {args.times}",
        }  # fmt: skip
        write_json(args.output / "results.json", trials, about)
        write_page(lambda: as_page(trials, about), args.output / "page.html", force=args.force)
        print(f"\nwritten to {args.output / 'results.json'} and {args.output / 'page.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
