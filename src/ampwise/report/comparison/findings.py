"""Match the findings of two runs, also if the script was edited between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.setup import file_name
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import steps_of, worst_first

if TYPE_CHECKING:
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import CountedFinding

__all__ = ["STATUSES", "ComparedFinding", "compared_findings", "plain_name"]

STATUSES = ("new", "open", "still", "gone")
NEAR = 20  # how many lines an edited line may have moved and still match
MOST_TRIED = 1_000_000  # pairs of one rule in one file to try; only an artificial record has more
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that data parallelism and torch.compile add to names
THE_SCRIPT = "(the script)"  # replaces the name of each run's script, so that a renamed copy matches


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFinding:
    """A finding of one run or of both.

    ``rate`` is how often it occurred per rank and step of the run (steps of the optimizer that took the most), so a
    finding at every step of two optimizers has a rate of 2. None for a run without steps.
    """

    before: CountedFinding | None
    after: CountedFinding | None
    rate_before: float | None = None
    rate_after: float | None = None
    other_known: bool = True  # whether all findings of the run without it could be read

    @property
    def status(self) -> str:
        """Status "gone", "new" or "still"; "open" if the other run's findings could not all be read."""
        if self.before is not None and self.after is not None:
            return "still"
        return "open" if not self.other_known else "new" if self.before is None else "gone"

    @property
    def seen(self) -> CountedFinding:
        """The finding in the later run, or else in the earlier one."""
        found = self.after or self.before
        assert found is not None
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        finding = self.seen.finding
        return {
            "status": self.status,
            "code": finding.rule.code,
            "name": finding.rule.name,
            "severity": str(finding.severity),
            "message": finding.message,
            "fix": finding.fix,
            "before": _as_dict(self.before, self.rate_before),
            "after": _as_dict(self.after, self.rate_after),
        }


def compared_findings(before: Run, after: Run) -> list[ComparedFinding]:
    """Return every finding of the two runs: new, open, still there, gone; worst first within each status.

    Two findings match if they have the same rule, file, parameter, module and device. The script itself counts as the
    same file, whatever its name. If several match, those whose source line has the same text are paired first, then
    those whose lines are nearest; lines whose texts are known and differ must be at most 20 lines apart. Steps, ranks
    and messages (which contain numbers) are ignored.
    """
    olds, news = before.merged_findings(), after.merged_findings()
    matches = _match([_Position.of(one, before) for one in olds], [_Position.of(one, after) for one in news])
    matched = {new: olds[old] for old, new in matches.items()}

    def compared(old: CountedFinding | None, new: CountedFinding | None) -> ComparedFinding:
        return ComparedFinding(
            before=old,
            after=new,
            rate_before=_rate(old, before),
            rate_after=_rate(new, after),
            other_known=before.findings_known if old is None else after.findings_known,
        )

    everything = [compared(matched.get(place), new) for place, new in enumerate(news)]
    everything += [compared(old, None) for place, old in enumerate(olds) if place not in matches]
    return sorted(everything, key=_order(everything))


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a finding: ``key`` must be equal to match; cell, line and text should be similar."""

    key: tuple[object, ...]
    cell: int
    line: int | None
    text: str | None

    @classmethod
    def of(cls, counted: CountedFinding, run: Run) -> _Position:
        place = counted.finding.place
        named = plain_name(place.parameter or place.module or "")
        key = (counted.finding.rule.code, _file(place.file, run), named, place.device)
        text = recorded_lines(counted).get(place.line or 0)
        return cls(key, place.cell or 0, place.line, None if text is None else " ".join(text.split()))

    def distance(self, other: _Position) -> tuple[int, int]:
        """Return the distance in cells of a notebook, and in lines."""
        lines = abs(self.line - other.line) if self.line is not None and other.line is not None else 0
        return abs(self.cell - other.cell), lines

    def may_match(self, other: _Position) -> bool:
        """Return whether the source lines allow a match."""
        if self.text is None or other.text is None or self.text == other.text:
            return True
        return self.distance(other) <= (0, NEAR)


def _match(olds: Sequence[_Position], news: Sequence[_Position]) -> dict[int, int]:
    """Return the index of the new finding for each old one that has a match."""
    here, there = _by_key(olds), _by_key(news)
    found: dict[int, int] = {}
    for key in here.keys() & there.keys():
        found |= _nearest_first(here[key], there[key], olds, news)
    return found


def _by_key(positions: Sequence[_Position]) -> dict[tuple[object, ...], list[int]]:
    numbers: dict[tuple[object, ...], list[int]] = {}
    for number, position in enumerate(positions):
        numbers.setdefault(position.key, []).append(number)
    return numbers


def _nearest_first(
    here: list[int], there: list[int], olds: Sequence[_Position], news: Sequence[_Position]
) -> dict[int, int]:
    if len(here) * len(there) > MOST_TRIED:
        return dict(zip(here, there, strict=False))
    pairs = [(old, new) for old, new in itertools.product(here, there) if olds[old].may_match(news[new])]
    pairs.sort(key=lambda pair: _cost(olds[pair[0]], news[pair[1]]))
    found: dict[int, int] = {}
    taken: set[int] = set()
    for old, new in pairs:
        if old not in found and new not in taken:
            found[old] = new
            taken.add(new)
    return found


def _cost(old: _Position, new: _Position) -> tuple[object, ...]:
    same_text = old.text is not None and old.text == new.text
    return (not same_text, *old.distance(new))


def _file(file: str | None, run: Run) -> str | None:
    if file is None:
        return None
    name = file_name(file)
    return THE_SCRIPT if name == file_name(run.manifest.get("script")) else name


def _rate(counted: CountedFinding | None, run: Run) -> float | None:
    steps = steps_of(run)
    return None if counted is None or not steps else counted.count / steps / max(1, len(counted.ranks))


def _order(everything: Sequence[ComparedFinding]) -> Any:
    places = {id(counted): place for place, counted in enumerate(worst_first([one.seen for one in everything]))}
    return lambda one: (STATUSES.index(one.status), places[id(one.seen)])


def _as_dict(counted: CountedFinding | None, rate: float | None) -> dict[str, Any] | None:
    if counted is None:
        return None
    return {
        "place": counted.finding.place.as_dict(),
        "count": counted.count,
        "per_step": rate,
        "first_step": counted.first_step,
        "last_step": counted.last_step,
        "ranks": list(counted.ranks),
    }
