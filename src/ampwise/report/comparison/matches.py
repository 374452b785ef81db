"""Match the findings and the layers of two runs, also if the script was edited between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampwise.report.layers import LayerGradients
from ampwise.report.run_facts import steps_of
from ampwise.report.source_lines import recorded_lines
from ampwise.report.verdict import worst_first
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

STATUSES = ("new", "open", "still", "gone")
NEAR = 20  # how many lines an edited line may have moved and still match
MOST_TRIED = 1_000_000  # pairs of one rule in one file to try; only an artificial record has more
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that data parallelism and torch.compile add to names
THE_SCRIPT = "(the script)"  # replaces the name of each run's script, so that a renamed copy matches
REPORTED_CHANGE = 0.01  # report a change of the lost share of a layer from here on
SAME_SIZE = 0.02  # relative difference in size: a vocabulary padded to a multiple of 64 matches, a wider layer does not
ENOUGH = 0.5  # share of layers in common: two versions of a model rather than two models
FACTOR = 1.5  # between two norms: two seeds differ by less


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def file_name(path: object) -> str:
    """Return a file's name without its folder, also for a Windows path: the folder differs between machines.

    >>> file_name("/home/a/train.py"), file_name("C:\\\\work\\\\train.py"), file_name(None)
    ('train.py', 'train.py', '')
    """
    return str(path or "").replace("\\", "/").rpartition("/")[2]


# --- findings ------------------------------------------------------------------------------------------------------


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

        def side(counted: CountedFinding | None, rate: float | None) -> dict[str, Any] | None:
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

        finding = self.seen.finding
        return {
            "status": self.status,
            "code": finding.rule.code,
            "name": finding.rule.name,
            "severity": str(finding.severity),
            "message": finding.message,
            "fix": finding.fix,
            "before": side(self.before, self.rate_before),
            "after": side(self.after, self.rate_after),
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

    def rate(counted: CountedFinding | None, run: Run) -> float | None:
        steps = steps_of(run)
        return None if counted is None or not steps else counted.count / steps / max(1, len(counted.ranks))

    def compared(old: CountedFinding | None, new: CountedFinding | None) -> ComparedFinding:
        return ComparedFinding(
            before=old,
            after=new,
            rate_before=rate(old, before),
            rate_after=rate(new, after),
            other_known=before.findings_known if old is None else after.findings_known,
        )

    everything = [compared(matched.get(place), new) for place, new in enumerate(news)]
    everything += [compared(old, None) for place, old in enumerate(olds) if place not in matches]
    places = {id(counted): place for place, counted in enumerate(worst_first([one.seen for one in everything]))}
    return sorted(everything, key=lambda one: (STATUSES.index(one.status), places[id(one.seen)]))


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
        file = None if place.file is None else file_name(place.file)
        if file is not None and file == file_name(run.manifest.get("script")):
            file = THE_SCRIPT
        text = recorded_lines(counted).get(place.line or 0)
        key = (counted.finding.rule.code, file, named, place.device)
        return cls(key, place.cell or 0, place.line, None if text is None else " ".join(text.split()))

    def distance(self, other: _Position) -> tuple[int, int]:
        """Return the distance in cells of a notebook, and in lines."""
        lines = abs(self.line - other.line) if self.line is not None and other.line is not None else 0
        return abs(self.cell - other.cell), lines


def _match(olds: Sequence[_Position], news: Sequence[_Position]) -> dict[int, int]:
    """Return the index of the new finding for each old one that has a match."""
    groups: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    for side, positions in enumerate((olds, news)):
        for number, position in enumerate(positions):
            groups.setdefault(position.key, ([], []))[side].append(number)
    found: dict[int, int] = {}
    taken: set[int] = set()
    for here, there in groups.values():
        if len(here) * len(there) > MOST_TRIED:
            found |= dict(zip(here, there, strict=False))
            continue
        pairs = []
        for old, new in itertools.product(here, there):
            one, other = olds[old], news[new]
            same_text = one.text is not None and one.text == other.text
            if same_text or one.text is None or other.text is None or one.distance(other) <= (0, NEAR):
                pairs.append(((not same_text, *one.distance(other)), old, new))
        for _, old, new in sorted(pairs, key=lambda pair: pair[0]):  # the nearest first
            if old not in found and new not in taken:
                found[old] = new
                taken.add(new)
    return found


# --- layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayer:
    """A layer that both runs have. Lost shares are None for a run that did not compute in FP16."""

    name: str
    optimizer: int
    lost_before: float | None
    lost_after: float | None
    norm_before: float
    norm_after: float

    @property
    def more_lost(self) -> float:
        """Increase of the lost share; 0 if one of the runs does not have it."""
        if self.lost_before is None or self.lost_after is None:
            return 0.0
        return self.lost_after - self.lost_before

    @property
    def doublings(self) -> float:
        """Binary logarithm of the change of the norm; infinite if it was zero or became zero."""
        old, new = self.norm_before, self.norm_after
        if old == new or not (math.isfinite(old) and math.isfinite(new)):
            return 0.0
        return math.log2(new) - math.log2(old) if old and new else math.inf if new else -math.inf

    @property
    def changed(self) -> bool:
        """Whether the layer changed enough to be reported."""
        return abs(self.more_lost) >= REPORTED_CHANGE or abs(self.doublings) >= math.log2(FACTOR)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        parts = ("name", "optimizer", "lost_before", "lost_after", "norm_before", "norm_after", "changed")
        return {part: getattr(self, part) for part in parts}


def compared_layers(before: Sequence[LayerGradients], after: Sequence[LayerGradients]) -> list[ComparedLayer]:
    """Return the layers that both runs have, the most changed first: by the lost share, then by the norm.

    Two layers match if they have the same name, optimizer and number of values.
    """
    known = _by_name(before)
    found = [
        ComparedLayer(
            name=plain_name(layer.name),
            optimizer=layer.optimizer,
            lost_before=old.lost,
            lost_after=layer.lost,
            norm_before=old.norm,
            norm_after=layer.norm,
        )
        for layer in after
        if (old := _same_layer(known, layer)) is not None
    ]
    # Rounded to a hundredth: a finer order would be noise.
    return sorted(found, key=lambda layer: (-round(abs(layer.more_lost), 2), -abs(layer.doublings)))


def are_alike(before: Sequence[LayerGradients], after: Sequence[LayerGradients], in_common: int) -> bool:
    """Return whether two runs trained roughly the same model, by the number of layers in common."""
    return in_common >= ENOUGH * max(len(before), len(after))


def only_in(layers: Sequence[LayerGradients], others: Sequence[LayerGradients]) -> list[str]:
    """Return the names of layers that the other run lacks, in the order of ``layers``; with the size if it differs."""
    known = _by_name(others)
    names = []
    for layer in layers:
        name = plain_name(layer.name)
        if _same_layer(known, layer) is None:
            names.append(f"{name} ({_values(layer):,.0f} values)" if (layer.optimizer, name) in known else name)
    return names


def _by_name(layers: Sequence[LayerGradients]) -> dict[tuple[int, str], LayerGradients]:
    return {(layer.optimizer, plain_name(layer.name)): layer for layer in layers}


def _same_layer(known: Mapping[tuple[int, str], LayerGradients], layer: LayerGradients) -> LayerGradients | None:
    other = known.get((layer.optimizer, plain_name(layer.name)))
    return other if other is not None and math.isclose(_values(layer), _values(other), rel_tol=SAME_SIZE) else None


def _values(layer: LayerGradients) -> float:
    """Return the number of values in one step."""
    return layer.census.count / max(1, layer.steps)
