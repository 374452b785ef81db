"""Findings as they come up: each judged once, then counted."""

from __future__ import annotations

import typing
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from typing import Any

from ampwise.finding import Finding
from ampwise.record.rows import Seen
from ampwise.rules import rules_about

__all__ = ["Findings", "checks_of"]

MOST = 1000  # findings of a run: whoever has more of them has one cause

Check = Callable[[Any], Iterator[Finding]]


@cache
def checks_of(room: str) -> dict[type, tuple[Check, ...]]:
    """The checks of a room, by the kind of evidence that they take."""
    found: dict[type, tuple[Check, ...]] = {}
    for module in rules_about(room):
        for check in _checks_in(module):
            (evidence, *_) = typing.get_type_hints(check).values()
            for kind in typing.get_args(evidence) or (evidence,):
                found[kind] = (*found.get(kind, ()), check)
    return found


def _checks_in(module: Any) -> list[Check]:
    """``check``, and others named alike: a rule may be broken in more than one way."""
    return [value for name, value in vars(module).items() if name.startswith("check") and callable(value)]


class Findings:
    """What was found so far."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Seen] = {}
        self._known: dict[Any, tuple[Hashable, ...]] = {}  # evidence that was judged before
        self._given: dict[Hashable, set[Hashable]] = {}  # findings of what is judged again as it grows
        self.changed = False  # since someone last looked

    def judge(self, evidence: Any, step: int | None = None, *, room: str = "step") -> None:
        """Judge a record by the room's rules; an equal one is only counted."""
        keys = self._known.get(evidence)
        if keys is None:
            keys = tuple(self.add(finding, step) for finding in self._judged(evidence, room))
            if len(self._known) < MOST * 10:
                self._known[evidence] = keys
            return
        for key in keys:
            self._count(self._seen[key], step)

    def judge_whole(self, evidence: Any, room: str) -> None:
        """Judge what has grown since it was last judged: the new findings replace the old."""
        source = (room, type(evidence), getattr(evidence, "optimizer", None))
        before, now = self._given.get(source, set()), set()
        for finding in self._judged(evidence, room):
            shown = dict(finding.evidence)
            times = shown.pop("times", None)  # of what happened often and is judged once
            now.add(self._replace(finding.but(evidence=shown), times, before))
        for key in before - now:  # the worst of several is another by now, or it was no finding after all
            del self._seen[key]
            self.changed = True
        self._given[source] = now

    def _replace(self, finding: Finding, times: int | None, before: set[Hashable]) -> Hashable:
        key = _key(finding)
        same_rule = [self._seen[old] for old in before if self._seen[old].finding.rule is finding.rule]
        if key not in self._seen:
            self.add(finding, min((old.first_step or 0 for old in same_rule), default=finding.place.step) or None)
        seen = self._seen.get(key)
        if seen is None:
            return key  # there are too many
        if seen.finding != finding:
            seen.finding = finding
            self.changed = True
        seen.count = seen.count if times is None else times
        return key

    def add(self, finding: Finding, step: int | None = None) -> Hashable:
        """One more finding, or one more time the same."""
        key = _key(finding)
        if key in self._seen:
            self._count(self._seen[key], step)
        elif len(self._seen) < MOST:
            self._seen[key] = Seen(finding=finding, first_step=step, last_step=step)
        else:
            return next(iter(self._seen))
        self.changed = True
        return key

    def __iter__(self) -> Iterator[Seen]:
        return iter(sorted(self._seen.values(), key=lambda seen: (seen.finding.severity.rank, -seen.count)))

    def __len__(self) -> int:
        return len(self._seen)

    def _count(self, seen: Seen, step: int | None) -> None:
        seen.count += 1
        seen.last_step = step if step is not None else seen.last_step
        self.changed = True

    @staticmethod
    def _judged(evidence: Any, room: str) -> Iterable[Finding]:
        return (finding for check in checks_of(room).get(type(evidence), ()) for finding in check(evidence))


def _key(finding: Finding) -> Hashable:
    """What makes two findings one: the rule and the place, whatever the numbers of the day."""
    place = finding.place
    return (finding.rule.code, place.file, place.line, place.module, place.parameter, place.device)
