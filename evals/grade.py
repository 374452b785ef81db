"""Grades an answer: what it claims, what `ampwise check` finds in its code, and what that code does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ampwise.check.config import SettingsByFolder
from ampwise.check.linter import RuleSelection, check_text
from ampwise.finding import Severity
from evals.sandbox import Sandbox
from evals.scenarios import Scenario
from evals.statements import all_statements, code_blocks, excuses, prose_of

FACT = "fact: "
LONGEST_ANSWER = 200_000  # characters: an answer, not a book


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that was graded: a fact, a false claim, or what the code is and does."""

    what: str
    ok: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """The marks of an answer, and the excuses in it, which are counted and decide nothing."""

    marks: tuple[Mark, ...]
    excuses: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(mark.ok for mark in self.marks)

    @property
    def unclear(self) -> bool:
        """Whether nothing is wrong, but a fact was not found: it is missing, or said in words that no pattern has."""
        return not self.passed and all(mark.what.startswith(FACT) for mark in self.failed)

    @property
    def failed(self) -> tuple[Mark, ...]:
        return tuple(mark for mark in self.marks if not mark.ok)


def grade(scenario: Scenario, answer: str, sandbox: Sandbox) -> Grade:
    """Return the marks of an answer to a scenario."""
    if not answer.strip():
        return Grade((Mark("answer", False, "it is empty"),))
    if len(answer) > LONGEST_ANSWER:
        return Grade((Mark("answer", False, f"it is longer than {LONGEST_ANSWER:,} characters"),))
    prose = prose_of(answer)
    marks = list(_claims(scenario, prose))
    if scenario.test:
        marks += _code(scenario, answer, sandbox)
    seen = tuple(said for said, pattern in excuses().items() if pattern.search(prose.lower().replace("’", "'")))
    return Grade(tuple(marks), seen)


def _claims(scenario: Scenario, prose: str) -> Iterator[Mark]:
    """Yield a mark for each fact that is asked for, and for each wrong claim."""
    named = {*scenario.facts, *scenario.traps}
    for statement in all_statements().values():
        sides = statement.sides(prose, asked=statement.name in named)
        wrong = next((side for side in sides if side.asserts != statement.true), None)
        if wrong is not None:
            yield Mark(f"claim: {statement.name}", False, f"it says: {wrong.sentence[:200]}")
        elif statement.name in scenario.facts:
            verb = "say" if statement.true else "deny"
            yield Mark(FACT + statement.name, bool(sides), "" if sides else f"it does not {verb}: {statement.text}")


def _code(scenario: Scenario, answer: str, sandbox: Sandbox) -> Iterator[Mark]:
    blocks = code_blocks(answer)
    if not blocks:
        yield Mark("code", False, "there is no fenced Python block")
        return
    code = blocks[-1]
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        yield Mark("code", False, f"the last Python block does not parse: {error}")
        return
    # What an answer suppresses is its own opinion of its code.
    report, _ = check_text(re.sub(r"#\s*noqa", "#", code, flags=re.IGNORECASE), "answer.py", _rules())
    found = [
        finding
        for finding in report.findings
        if finding.severity is not Severity.INFO and finding.rule.code not in scenario.allow
    ]
    why = "; ".join(f"{finding.rule.code} {finding.message}" for finding in found)
    yield Mark("ampwise check", not found, why[:300])
    wrong = sandbox.run(code, scenario.test)
    yield Mark("run", wrong is None, wrong or "")


@cache
def _rules() -> RuleSelection:
    return RuleSelection(SettingsByFolder(isolated=True))
