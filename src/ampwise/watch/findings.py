"""Findings of a running script: equal evidence is judged once, then counted."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from ampwise.finding import Finding
from ampwise.rules import run_checks
from ampwise.runs.rows import CountedFinding

__all__ = ["Findings"]

MOST = 1000  # findings of a run; more than these have a common cause


class Findings:
    """Findings so far."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, CountedFinding] = {}
        self._known: dict[Any, tuple[Hashable, ...]] = {}  # evidence judged before, and the findings it gave
        self._by_source: dict[
            Hashable, dict[Hashable, CountedFinding]
        ] = {}  # findings by source, of evidence that is judged again as it grows
        self.changed = False  # since the flag was last cleared

    def judge(self, evidence: Any, step: int | None = None) -> None:
        """Judge evidence by the rules; count evidence that is equal to earlier evidence."""
        keys = self._known.get(evidence)
        if keys is None:
            added = [self.add(finding, step) for finding in run_checks(evidence)]
            keys = tuple(key for key in added if key is not None)
            if len(self._known) < MOST * 10:
                self._known[evidence] = keys
            return
        for key in keys:
            self._count(self._seen[key], step)

    def judge_whole(self, evidence: Any) -> None:
        """Judge evidence that has grown since it was last judged: new findings replace the old ones."""
        source = (type(evidence), getattr(evidence, "optimizer", None))
        before = self._by_source.get(source, {})
        now: dict[Hashable, CountedFinding] = {}
        for finding in run_checks(evidence):
            shown = dict(finding.evidence)
            times = shown.pop("times", None)  # how often it happened, where the evidence counts by itself
            key = (*_key(finding), source)
            older = [seen for seen in before.values() if seen.finding.rule is finding.rule]
            first = min((seen.first_step or 0 for seen in older), default=finding.place.step or 0)
            now[key] = before.get(key) or CountedFinding(finding=finding, first_step=first or None)
            now[key].finding = finding.but(evidence=shown)
            now[key].last_step = finding.place.step or now[key].last_step
            now[key].count = now[key].count if times is None else times
        self.changed |= bool(now or before)
        self._by_source[source] = now

    def add(self, finding: Finding, step: int | None = None) -> Hashable | None:
        """Add a finding, or count it once more. Return its key, or None if there are too many findings."""
        key = _key(finding)
        if key in self._seen:
            self._count(self._seen[key], step)
        elif len(self._seen) < MOST:
            self._seen[key] = CountedFinding(finding=finding, first_step=step, last_step=step)
        else:
            return None
        self.changed = True
        return key

    def __iter__(self) -> Iterator[CountedFinding]:
        every = [*self._seen.values(), *(seen for given in self._by_source.values() for seen in given.values())]
        return iter(sorted(every, key=_sort_key))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _count(self, seen: CountedFinding, step: int | None) -> None:
        seen.count += 1
        seen.last_step = step if step is not None else seen.last_step
        self.changed = True


def _sort_key(seen: CountedFinding) -> tuple[object, ...]:
    """Sort key: by severity, causes before their consequences, then by count."""
    return (seen.finding.severity.rank, not seen.finding.rule.names_the_cause, -seen.count)


def _key(finding: Finding) -> tuple[Hashable, ...]:
    """Return what identifies a finding: its rule and its place, without the numbers in its text."""
    place = finding.place
    return (finding.rule.code, place.file, place.line, place.module, place.parameter, place.device)
