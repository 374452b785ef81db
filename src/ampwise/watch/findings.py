"""Findings as they come up: each judged once, then counted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from ampwise.finding import Finding
from ampwise.record.rows import Seen
from ampwise.rules.judging import checks_of

__all__ = ["Findings"]

MOST = 1000  # findings of a run: whoever has more of them has one cause


class Findings:
    """What was found so far."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Seen] = {}
        self._known: dict[Any, tuple[Hashable, ...]] = {}  # evidence that was judged before
        self._given: dict[Hashable, dict[Hashable, Seen]] = {}  # of what is judged again as it grows
        self.changed = False  # since someone last looked

    def judge(self, evidence: Any, step: int | None = None, *, room: str = "step") -> None:
        """Judge a record by the room's rules; an equal one is only counted."""
        keys = self._known.get(evidence)
        if keys is None:
            added = [self.add(finding, step) for finding in self._judged(evidence, room)]
            keys = tuple(key for key in added if key is not None)
            if len(self._known) < MOST * 10:
                self._known[evidence] = keys
            return
        for key in keys:
            self._count(self._seen[key], step)

    def judge_whole(self, evidence: Any, room: str) -> None:
        """Judge what has grown since it was last judged: the new findings take the place of the old."""
        source = (room, type(evidence), getattr(evidence, "optimizer", None))
        before = self._given.get(source, {})
        now: dict[Hashable, Seen] = {}
        for finding in self._judged(evidence, room):
            shown = dict(finding.evidence)
            times = shown.pop("times", None)  # of what happened often and is judged once
            key = (*_key(finding), source)
            older = [seen for seen in before.values() if seen.finding.rule is finding.rule]
            first = min((seen.first_step or 0 for seen in older), default=finding.place.step or 0)
            now[key] = before.get(key) or Seen(finding=finding, first_step=first or None)
            now[key].finding = finding.but(evidence=shown)
            now[key].last_step = finding.place.step or now[key].last_step
            now[key].count = now[key].count if times is None else times
        self.changed |= bool(now or before)
        self._given[source] = now

    def add(self, finding: Finding, step: int | None = None) -> Hashable | None:
        """One more finding, or one more time the same; None if there are too many."""
        key = _key(finding)
        if key in self._seen:
            self._count(self._seen[key], step)
        elif len(self._seen) < MOST:
            self._seen[key] = Seen(finding=finding, first_step=step, last_step=step)
        else:
            return None
        self.changed = True
        return key

    def __iter__(self) -> Iterator[Seen]:
        every = [*self._seen.values(), *(seen for given in self._given.values() for seen in given.values())]
        return iter(sorted(every, key=_badness))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _count(self, seen: Seen, step: int | None) -> None:
        seen.count += 1
        seen.last_step = step if step is not None else seen.last_step
        self.changed = True

    @staticmethod
    def _judged(evidence: Any, room: str) -> Iterable[Finding]:
        return (finding for check in checks_of(room).get(type(evidence), ()) for finding in check(evidence))


def _badness(seen: Seen) -> tuple[object, ...]:
    """Where it began comes before what came of it, however often that was seen."""
    return (seen.finding.severity.rank, not seen.finding.rule.names_the_cause, -seen.count)


def _key(finding: Finding) -> tuple[Hashable, ...]:
    """What makes two findings one: the rule and the place, whatever the numbers of the day."""
    place = finding.place
    return (finding.rule.code, place.file, place.line, place.module, place.parameter, place.device)
