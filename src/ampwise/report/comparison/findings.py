"""Which findings of two runs are the same one, although the script was edited between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.setup import file_name
from ampwise.report.source_lines import kept_lines
from ampwise.report.verdict import steps_of, worst_first

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["STATUSES", "ComparedFinding", "compared_findings", "plain_name"]

STATUSES = ("new", "open", "still", "gone")
NEAR = 20  # lines that an edited line may have moved and still be taken for the same
MOST_TRIED = 1_000_000  # pairs of one rule in one file; beyond that a record is no person's
WRAPPERS = ("module.", "_orig_mod.")  # what data parallelism and torch.compile put before a name
THE_SCRIPT = "(the script)"  # stands for the script of each run, which a copy under another name is, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFinding:
    """A finding of either run, or of both.

    ``rate``: how often on a rank, a step of the run (those of the optimizer that took the most); so that what happens
    at every step of two optimizers has a rate of 2. None for a run without steps.
    """

    before: Seen | None
    after: Seen | None
    rate_before: float | None = None
    rate_after: float | None = None
    other_known: bool = True  # whether all findings of the run that does not have it could be read

    @property
    def status(self) -> str:
        """ "gone", "new" or "still"; "open" where the other run may have it, too, and could not be read."""
        if self.before is not None and self.after is not None:
            return "still"
        return "open" if not self.other_known else "new" if self.before is None else "gone"

    @property
    def seen(self) -> Seen:
        """As it stands in the run that has it; in the later one of both."""
        found = self.after or self.before
        assert found is not None
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        finding = self.seen.finding
        return {
            "status": self.status,
            "code": finding.rule.code,
            "name": finding.rule.name,
            "severity": str(finding.severity),
            "message": finding.message,
            "fix": finding.fix,
            "before": _told(self.before, self.rate_before),
            "after": _told(self.after, self.rate_after),
        }


def compared_findings(before: Run, after: Run) -> list[ComparedFinding]:
    """Every finding of the two: new, still there, gone, or open, where a run could not be read; each worst first.

    Two are the same if they have the same rule, the same file, and the same parameter, module and device. The script
    itself counts as one file, whatever it is called. Of several such, those whose source line has the same text
    belong together, and of the others those whose lines are nearest; where both texts are known and differ, at most
    20 lines apart. Steps, ranks and messages, which have numbers in them, do not count.
    """
    olds, news = before.merged_findings(), after.merged_findings()
    partners = _partners([_Spot.of(one, before) for one in olds], [_Spot.of(one, after) for one in news])
    matched = {new: olds[old] for old, new in partners.items()}

    def compared(old: Seen | None, new: Seen | None) -> ComparedFinding:
        return ComparedFinding(
            before=old,
            after=new,
            rate_before=_rate(old, before),
            rate_after=_rate(new, after),
            other_known=before.findings_known if old is None else after.findings_known,
        )

    everything = [compared(matched.get(place), new) for place, new in enumerate(news)]
    everything += [compared(old, None) for place, old in enumerate(olds) if place not in partners]
    return sorted(everything, key=_order(everything))


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


@dataclass(frozen=True, slots=True)
class _Spot:
    """What says where a finding is: ``key`` must be the same, the rest should be near."""

    key: tuple[object, ...]
    cell: int
    line: int | None
    text: str | None

    @classmethod
    def of(cls, seen: Seen, run: Run) -> _Spot:
        place = seen.finding.place
        named = plain_name(place.parameter or place.module or "")
        key = (seen.finding.rule.code, _file(place.file, run), named, place.device)
        text = kept_lines(seen).get(place.line or 0)
        return cls(key, place.cell or 0, place.line, None if text is None else " ".join(text.split()))

    def distance(self, other: _Spot) -> tuple[int, int]:
        """In cells of a notebook, and in lines."""
        lines = abs(self.line - other.line) if self.line is not None and other.line is not None else 0
        return abs(self.cell - other.cell), lines

    def may_be(self, other: _Spot) -> bool:
        if self.text is None or other.text is None or self.text == other.text:
            return True
        return self.distance(other) <= (0, NEAR)


def _partners(olds: Sequence[_Spot], news: Sequence[_Spot]) -> dict[int, int]:
    """Which old one is which new one, by their numbers."""
    here, there = _by_key(olds), _by_key(news)
    found: dict[int, int] = {}
    for key in here.keys() & there.keys():
        found |= _nearest_first(here[key], there[key], olds, news)
    return found


def _by_key(spots: Sequence[_Spot]) -> dict[tuple[object, ...], list[int]]:
    numbers: dict[tuple[object, ...], list[int]] = {}
    for number, spot in enumerate(spots):
        numbers.setdefault(spot.key, []).append(number)
    return numbers


def _nearest_first(here: list[int], there: list[int], olds: Sequence[_Spot], news: Sequence[_Spot]) -> dict[int, int]:
    if len(here) * len(there) > MOST_TRIED:
        return dict(zip(here, there, strict=False))
    pairs = [(old, new) for old, new in itertools.product(here, there) if olds[old].may_be(news[new])]
    pairs.sort(key=lambda pair: _cost(olds[pair[0]], news[pair[1]]))
    found: dict[int, int] = {}
    taken: set[int] = set()
    for old, new in pairs:
        if old not in found and new not in taken:
            found[old] = new
            taken.add(new)
    return found


def _cost(old: _Spot, new: _Spot) -> tuple[object, ...]:
    same_text = old.text is not None and old.text == new.text
    return (not same_text, *old.distance(new))


def _file(file: str | None, run: Run) -> str | None:
    if file is None:
        return None
    name = file_name(file)
    return THE_SCRIPT if name == file_name(run.manifest.get("script")) else name


def _rate(seen: Seen | None, run: Run) -> float | None:
    steps = steps_of(run)
    return None if seen is None or not steps else seen.count / steps / max(1, len(seen.ranks))


def _order(everything: Sequence[ComparedFinding]) -> Any:
    places = {id(seen): place for place, seen in enumerate(worst_first([one.seen for one in everything]))}
    return lambda one: (STATUSES.index(one.status), places[id(one.seen)])


def _told(seen: Seen | None, rate: float | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    return {
        "place": seen.finding.place.as_dict(),
        "count": seen.count,
        "per_step": rate,
        "first_step": seen.first_step,
        "last_step": seen.last_step,
        "ranks": list(seen.ranks),
    }
