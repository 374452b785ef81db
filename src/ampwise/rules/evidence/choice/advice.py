"""Findings about a proposal: advice against it or a caution; with facts, the cost of each option, and how to check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ampwise.finding import Finding, Place, Rule
from ampwise.rules.evidence.choice.choice import PrecisionChoice

__all__ = ["CAREFUL", "NO", "SuggestedCommand", "advise_against", "advises_against", "caution", "refused_precision"]

NO, CAREFUL = "no", "careful"


class SuggestedCommand(NamedTuple):
    """A command that answers the question in minutes, and what it shows."""

    command: str
    tells: str


def advise_against(
    rule: Rule,
    choice: PrecisionChoice,
    fact: str,
    *,
    costs: Mapping[str, str],
    know: SuggestedCommand,
    do: str | None = None,
    refuses: str | None = None,
) -> Finding:
    """Build a finding that advises against a proposal. ``refuses`` is the rejected precision, if there is one."""
    return _answer(NO, rule, choice, fact, costs, know, do, refuses)


def caution(
    rule: Rule,
    choice: PrecisionChoice,
    fact: str,
    *,
    costs: Mapping[str, str],
    know: SuggestedCommand,
    do: str | None = None,
) -> Finding:
    """Build a finding that cautions: the proposal is possible, and this is what it costs."""
    return _answer(CAREFUL, rule, choice, fact, costs, know, do, None)


def advises_against(finding: Finding) -> bool:
    return finding.evidence.get("answer") == NO


def refused_precision(finding: Finding) -> str | None:
    """Return the precision that the finding rejects."""
    found = finding.evidence.get("refuses")
    return None if found is None else str(found)


def _answer(
    answer: str,
    rule: Rule,
    choice: PrecisionChoice,
    fact: str,
    costs: Mapping[str, str],
    know: SuggestedCommand,
    do: str | None,
    refuses: str | None,
) -> Finding:
    evidence = {"answer": answer, "costs": dict(costs), "to_know": know._asdict()}
    if refuses is not None:
        evidence["refuses"] = refuses
    return rule.at(Place(device=choice.target.name), fact, evidence=evidence, fix=do)
