"""What a rule answers to a proposal: no, or be careful; with the fact, what each way costs, and how to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ampwise.evidence.choice.choice import Choice
from ampwise.finding import Finding, Place, Rule

__all__ = ["CAREFUL", "NO", "ToKnow", "careful", "is_no", "no", "refused"]

NO, CAREFUL = "no", "careful"


class ToKnow(NamedTuple):
    """The five-minute way to know: a command, and what it tells."""

    command: str
    tells: str


def no(
    rule: Rule,
    choice: Choice,
    fact: str,
    *,
    costs: Mapping[str, str],
    know: ToKnow,
    do: str | None = None,
    refuses: str | None = None,
) -> Finding:
    """A finding that says no. ``refuses`` is the precision that was wanted, where that is what it says no to."""
    return _answer(NO, rule, choice, fact, costs, know, do, refuses)


def careful(
    rule: Rule, choice: Choice, fact: str, *, costs: Mapping[str, str], know: ToKnow, do: str | None = None
) -> Finding:
    """A finding that says: it can be done, and this is what it costs."""
    return _answer(CAREFUL, rule, choice, fact, costs, know, do, None)


def is_no(finding: Finding) -> bool:
    return finding.evidence.get("answer") == NO


def refused(finding: Finding) -> str | None:
    """The precision that it says no to."""
    found = finding.evidence.get("refuses")
    return None if found is None else str(found)


def _answer(
    answer: str,
    rule: Rule,
    choice: Choice,
    fact: str,
    costs: Mapping[str, str],
    know: ToKnow,
    do: str | None,
    refuses: str | None,
) -> Finding:
    evidence = {"answer": answer, "costs": dict(costs), "to_know": know._asdict()}
    if refuses is not None:
        evidence["refuses"] = refuses
    return rule.at(Place(device=choice.target.name), fact, evidence=evidence, fix=do)
