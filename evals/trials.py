"""Runs an agent on scenarios, with and without the skill, and counts by scenario, by pressure, and by excuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evals.agents import Reply, ask
from evals.grade import Grade, Mark, grade
from evals.sandbox import Sandbox
from evals.scenarios import Scenario, all_scenarios

SKILL = {False: "without the skill", True: "with the skill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An answer of an agent, and its marks."""

    scenario: str
    skill: bool
    number: int
    passed: bool
    unclear: bool
    seconds: float
    answer: str
    marks: tuple[Mark, ...]
    excuses: tuple[str, ...]


def run_trials(
    command: list[str],
    scenarios: Sequence[Scenario],
    *,
    skills: Sequence[bool],
    times: int,
    seconds: float,
    jobs: int = 1,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Ask the agent, so many at a time, and grade in this thread; a trial without an answer fails."""
    asked = [(scenario, skill, number) for scenario in scenarios for skill in skills for number in range(1, times + 1)]
    trials = []
    with Sandbox() as sandbox, ThreadPoolExecutor(jobs) as pool:
        replies = pool.map(lambda each: ask(command, each[0], skill=each[1], seconds=seconds), asked)
        for (scenario, skill, number), reply in zip(asked, replies, strict=True):
            graded = _graded(scenario, reply, sandbox)
            trial = Trial(
                scenario=scenario.id,
                skill=skill,
                number=number,
                passed=graded.passed,
                unclear=graded.unclear,
                seconds=round(reply.seconds, 2),
                answer=reply.text,
                marks=graded.marks,
                excuses=graded.excuses,
            )
            trials.append(trial)
            report(trial)
    return trials


def _graded(scenario: Scenario, reply: Reply, sandbox: Sandbox) -> Grade:
    if reply.error:
        return Grade((Mark("agent", False, reply.error),))
    return grade(scenario, reply.text, sandbox)


class Count(NamedTuple):
    """How many of all trials passed, and how many are unclear: these are for a person to read."""

    passed: int
    unclear: int
    all: int

    def __str__(self) -> str:
        return f"{self.passed} of {self.all}" + (f", {self.unclear} unclear" if self.unclear else "")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: how many of the trials passed, by whether the agent had the skill."""

    name: str
    counts: dict[bool, Count]

    def cells(self, skills: Iterable[bool]) -> list[str]:
        return [str(self.counts[skill]) for skill in skills]


def by_scenario(trials: Sequence[Trial]) -> list[Row]:
    return [_row(name, trials, lambda trial, name=name: trial.scenario == name) for name in _names(trials)]


def by_pressure(trials: Sequence[Trial]) -> list[Row]:
    """Return a row for each pressure that occurs, and one for all trials."""
    every = all_scenarios()
    found = Counter(pressure for name in _names(trials) for pressure in every[name].pressures)
    rows = [
        _row(pressure, trials, lambda trial, pressure=pressure: pressure in every[trial.scenario].pressures)
        for pressure in sorted(found)
    ]
    return [*rows, _row("all", trials, lambda trial: True)]


def by_excuse(trials: Sequence[Trial]) -> list[tuple[str, dict[bool, int]]]:
    """Return the excuses that were made, with the number of answers that made them."""
    found = Counter((excuse, trial.skill) for trial in trials for excuse in trial.excuses)
    return [(name, {skill: found[name, skill] for skill in SKILL}) for name in sorted({name for name, _ in found})]


def _names(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(trial.scenario for trial in trials))


def _row(name: str, trials: Sequence[Trial], wanted: Callable[..., bool]) -> Row:
    chosen = [trial for trial in trials if wanted(trial)]
    counts = {}
    for skill in SKILL:
        own = [trial for trial in chosen if trial.skill == skill]
        counts[skill] = Count(sum(trial.passed for trial in own), sum(trial.unclear for trial in own), len(own))
    return Row(name, counts)


def skills_of(trials: Sequence[Trial]) -> list[bool]:
    return sorted({trial.skill for trial in trials})


def as_text(trials: Sequence[Trial]) -> str:
    """Return the tables for a terminal: passed and all, by scenario, pressure and excuse."""
    return "\n".join(_lines(trials)) + "\n"


def _lines(trials: Sequence[Trial]) -> Iterator[str]:
    skills = skills_of(trials)
    excuses = [(name, [str(count[skill]) for skill in skills]) for name, count in by_excuse(trials)]
    tables = [
        ("scenario, passed", [(row.name, row.cells(skills)) for row in by_scenario(trials)]),
        ("pressure, passed", [(row.name, row.cells(skills)) for row in by_pressure(trials)]),
        ("excuse, answers", excuses),
    ]
    width = max(len(name) for _, rows in tables for name, _ in [*rows, ("pressure, passed", [])])
    for title, rows in tables:
        if rows:
            yield f"{title:<{width}}  " + "  ".join(f"{SKILL[skill]:>20}" for skill in skills)
            yield from (f"{name:<{width}}  " + "  ".join(f"{cell:>20}" for cell in cells) for name, cells in rows)
            yield ""


def write_json(path: Path, trials: Sequence[Trial], about: dict[str, Any]) -> None:
    """Write everything: what was run, and each answer with its marks."""
    record = about | {"trials": [asdict(trial) for trial in trials]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
