"""Answers written by hand, each labelled right or wrong: what the grader is tested with, and how often it errs.

    python -m evals.labelled

Those in ``data/answers/seen`` were used to tune it; those in ``unseen`` were graded once, and it was left as it was.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

from evals.grade import Grade, grade
from evals.sandbox import Sandbox
from evals.scenarios import DATA, all_scenarios

SETS = ("seen", "unseen")


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer, and whether it is right."""

    file: str
    scenario: str
    right: bool
    kind: str
    text: str


def labelled(which: str) -> list[Labelled]:
    """Return the answers of a set, "seen" or "unseen"."""
    found = []
    for path in sorted((DATA / "answers" / which).glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["answers"]
        found += [Labelled(path.stem, **row) for row in rows]
    return found


def misgraded(answers: list[Labelled], sandbox: Sandbox) -> Iterator[tuple[Labelled, Grade]]:
    """Yield the answers whose grade is not their label."""
    scenarios = all_scenarios()
    for each in answers:
        graded = grade(scenarios[each.scenario], each.text, sandbox)
        if graded.passed != each.right:
            yield each, graded


def main() -> None:
    """Print the error rates of each set, and each error."""
    with Sandbox(seconds=5) as sandbox:
        for which in SETS:
            answers = labelled(which)
            wrong = list(misgraded(answers, sandbox))
            passed = sum(not each.right for each, _ in wrong)
            print(f"{which}: {len(answers)} answers, {sum(each.right for each in answers)} right")
            unclear = sum(graded.unclear for each, graded in wrong if each.right)
            print(f"  wrong answers that passed: {passed}; right answers that are unclear: {unclear}", end="")
            print(f", that failed: {len(wrong) - passed - unclear}")
            for each, graded in wrong:
                why = "; ".join(f"{mark.what}: {mark.why}" for mark in graded.failed)
                print(f"  {each.file}, {each.scenario}, {each.kind}: {why or 'passed'}")


if __name__ == "__main__":
    main()
