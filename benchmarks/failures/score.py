"""Which line and which kind ampwise names for each program, and what others would have said."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ampwise
from ampwise.errors import AmpwiseError
from ampwise.finding import Finding
from benchmarks.failures.case import Case, Label, Program
from benchmarks.failures.others import Said, anomaly_says, hooks_say
from benchmarks.failures.plain import quiet, train

__all__ = ["AIM", "Score", "Totals", "engine_finds", "of_trace", "score", "totals", "trace_finds", "traces"]

AIM = {"lines": 1.0, "kinds": 0.95, "false alarms": 0}
OF_TRACE = "AMP9"  # how the codes of its rules begin


@dataclass(frozen=True)
class Score:
    """Of one program: what was found, by the engine and by ampwise.trace alone where that can be asked."""

    program: Program
    found: Sequence[Finding]
    found_directly: Sequence[Finding] | None = None  # None: not asked
    others: dict[str, Said] = field(default_factory=dict)

    @property
    def line_is_right(self) -> bool:
        return all(_on_the_line(each, self.program) for each in self._asked)

    @property
    def kind_is_right(self) -> bool:
        """Of the finding on the right line."""
        label = self.program.label
        return label is not None and all(
            any(finding.rule.name == label.kind for finding in _on_the_line(each, self.program)) for each in self._asked
        )

    @property
    def is_false_alarm(self) -> bool:
        return self.program.label is None and bool(self.found)

    @property
    def _asked(self) -> list[Sequence[Finding]]:
        return [self.found] if self.found_directly is None else [self.found, self.found_directly]


@dataclass(frozen=True, kw_only=True)
class Totals:
    failing: int
    lines: int
    kinds: int
    healthy: int
    false_alarms: int

    @property
    def reach_the_aim(self) -> bool:
        return (
            self.lines >= AIM["lines"] * self.failing
            and self.kinds >= AIM["kinds"] * self.failing
            and self.false_alarms <= AIM["false alarms"]
        )

    def __str__(self) -> str:
        return (
            f"Lines: {_share(self.lines, self.failing)}; wanted: all. "
            f"Kinds: {_share(self.kinds, self.failing)}; wanted: {AIM['kinds']:.0%} at least. "
            f"False alarms: {self.false_alarms} in {self.healthy} healthy programs; wanted: none."
        )


def traces() -> bool:
    """Whether this ampwise traces a bad step at all."""
    return hasattr(ampwise.Engine, "findings") and hasattr(ampwise, "trace")


def score(program: Program, *, others: bool) -> Score:
    case = program.case()
    return Score(
        program,
        engine_finds(case),
        trace_finds(program.case()) if case.direct else None,
        {"detect_anomaly": anomaly_says(program), "forward hooks": hooks_say(program)} if others else {},
    )


def engine_finds(case: Case) -> list[Finding]:
    """Train as a user would, and return what the tracer found."""
    with quiet(), redirect_stderr(io.StringIO()):  # where the engine tells what it has found
        engine: Any = ampwise.Engine(case.model, case.optimizer, precision=case.precision, **case.options)
        try:
            for batch in case.batches:
                engine.step(case.loss_fn, *batch)
        except AmpwiseError:
            pass  # a scale that collapsed ends the training; what was found counts
        engine.close()
    return of_trace(engine.findings)


def trace_finds(case: Case) -> list[Finding]:
    """Train by hand until a step is bad, and ask ampwise.trace about that one."""
    trace: Any = ampwise.trace
    for seen in train(case):
        if not seen.is_finite:
            case.optimizer.zero_grad()
            with quiet():
                return of_trace(trace(case.loss_fn, *case.batches[seen.index]))
    return []


def of_trace(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.rule.code.startswith(OF_TRACE)]


def totals(scores: Iterable[Score]) -> Totals:
    scores = list(scores)
    failing = [each for each in scores if each.program.label is not None]
    return Totals(
        failing=len(failing),
        lines=sum(each.line_is_right for each in failing),
        kinds=sum(each.kind_is_right for each in failing),
        healthy=len(scores) - len(failing),
        false_alarms=sum(each.is_false_alarm for each in scores),
    )


def _on_the_line(findings: Iterable[Finding], program: Program) -> list[Finding]:
    return [each for each in findings if program.label is not None and _is_at(each, program.path, program.label)]


def _is_at(finding: Finding, path: Path, label: Label) -> bool:
    file = finding.place.file
    return file is not None and Path(file).resolve() == path and finding.place.line == label.line


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "of no failing programs"
