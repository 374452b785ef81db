"""Compare two runs: which findings are gone or new, and which numbers have changed by more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.findings import STATUSES, ComparedFinding, compared_findings
from ampwise.report.comparison.layers import ComparedLayer, are_alike, compared_layers, only_in
from ampwise.report.comparison.numbers import SEED_WARNING, UNCLEAR, ComparedNumber, compared_numbers, steps_in_common
from ampwise.report.comparison.setup import SetupDifference, same_script, setup_differences
from ampwise.report.layers import layers_of
from ampwise.report.verdict import UNKNOWN, ending, steps_of

if TYPE_CHECKING:
    from ampwise.report.layers import LayerGradients
    from ampwise.runs.reader import Run
    from ampwise.runs.rows import CountedFinding

__all__ = ["VERSION", "Comparison"]

VERSION = 1
# The numbers that decide between better and worse. The time per step is not among them: a busy machine changes it.
LOSSES = ("loss_at_end", "losses_not_finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one run to another."""

    before: str  # the folders of the records
    after: str
    findings: tuple[ComparedFinding, ...] = ()
    setup: tuple[SetupDifference, ...] = ()
    numbers: tuple[ComparedNumber, ...] = ()
    layers: tuple[ComparedLayer, ...] = ()  # layers of both, the most changed first
    only_before: tuple[str, ...] = ()  # layers
    only_after: tuple[str, ...] = ()
    shared_steps: int = 0  # the last step that both reached: losses are compared there
    one_record: bool = False  # compared with itself
    alike: bool = True  # at least half of the layers in common; numbers of two different models are not judged
    notes: tuple[str, ...] = ()  # sentences that a reader must know first
    statuses: tuple[str, str] = ("finished", "finished")
    endings: tuple[str, str] = ("", "")  # "failed after 3 steps"; empty for a run that ended well
    findings_known: tuple[bool, bool] = (True, True)  # if not, no finding is called new or gone

    @classmethod
    def of(cls, before: Run, after: Run) -> Comparison:
        """Compare two runs, of the same script or of different ones."""
        layers = (layers_of(before), layers_of(after))
        shared = compared_layers(*layers)
        # Runs that sampled no layers are matched by script name; many scripts are called train.py.
        alike = are_alike(*layers, len(shared)) if all(layers) else same_script(before, after)
        return cls(
            before=str(before.folder),
            after=str(after.folder),
            findings=tuple(compared_findings(before, after)),
            setup=tuple(setup_differences(before, after)),
            numbers=tuple(compared_numbers(before, after, layers, judge=alike)),
            layers=tuple(shared),
            only_before=tuple(only_in(layers[0], layers[1])),
            only_after=tuple(only_in(layers[1], layers[0])),
            shared_steps=steps_in_common(before, after),
            one_record=_one_record(before, after),
            alike=alike,
            notes=tuple(_notes(before, after, "" if alike else _unlike(layers, len(shared)))),
            statuses=(before.status, after.status),
            endings=(_ended(before), _ended(after)),
            findings_known=(before.findings_known, after.findings_known),
        )

    @property
    def new(self) -> list[ComparedFinding]:
        """Findings that only the later run has."""
        return self._that_are("new")

    @property
    def gone(self) -> list[ComparedFinding]:
        """Findings that only the earlier run has."""
        return self._that_are("gone")

    @property
    def still(self) -> list[ComparedFinding]:
        """Findings that both runs have."""
        return self._that_are("still")

    @property
    def caution(self) -> str:
        """Warning to show if two finite losses are judged better or worse; else empty."""
        judged = [one for one in self.numbers if one.key == "loss_at_end" and one.judged in ("better", "worse")]
        return SEED_WARNING if any(one.chance is not None for one in judged) else ""

    def _that_are(self, status: str) -> list[ComparedFinding]:
        return [one for one in self.findings if one.status == status]

    @property
    def verdict(self) -> str:
        """One sentence that sums up the comparison, without its full stop."""
        if self.one_record:
            return f"{self.after} is compared with itself; it has {_counted(len(self.findings))}"
        names = (self.before, self.after)
        badly = [f"{name} {how}" for name, how in zip(names, self.endings, strict=True) if how]
        return "; ".join([*badly, self._about_findings(), *self._about_loss()])

    def _about_findings(self) -> str:
        old, new = (sum(found is not None for found in side) for side in self._sides())
        if not all(self.findings_known):
            return "; ".join(self._as_far_as_known((old, new)))
        if not old and not new:
            return f"neither {self.before} nor {self.after} has findings"
        if not self.gone and not self.new:
            return f"{self.after} has the {_counted(new)} that {self.before} has"
        changed = f"{len(self.gone) or 'none'} gone, {len(self.new) or 'none'} new"
        return f"{self.after} has {_counted(new)} where {self.before} had {old or 'none'}: {changed}"

    def _sides(self) -> tuple[list[CountedFinding | None], list[CountedFinding | None]]:
        return [one.before for one in self.findings], [one.after for one in self.findings]

    def _as_far_as_known(self, counts: tuple[int, int]) -> Iterator[str]:
        for name, count, known in zip((self.before, self.after), counts, self.findings_known, strict=True):
            if known:
                yield f"{name} has {_counted(count)}"
            else:
                yield f"the findings of {name} could not {'all ' if count else ''}be read"

    def _about_loss(self) -> list[str]:
        loss = next((one for one in self.numbers if one.key == "loss_at_end"), None)
        if not self.alike or loss is None or loss.before is None or loss.after is None:
            return []
        values = f"{loss.written(loss.after)} against {loss.written(loss.before)}"
        unclear = f", {UNCLEAR}" if loss.judged == UNCLEAR else ""
        of = f" of {loss.owner}" if loss.owner else ""
        return [f"loss{of} after {_counted(self.shared_steps, 'step')} {values}{unclear}"]

    @property
    def mood(self) -> str:
        """State of the later run relative to the earlier: a severity, or "ok"; from findings, endings and losses."""
        worst = [str(one.seen.finding.severity) for one in self.new]  # worst first
        worse = any(one.judged == "worse" for one in self.numbers if one.key in LOSSES)
        if self.endings[1] and not self.endings[0]:
            return "error"
        if (worse or not all(self.findings_known)) and worst[:1] != ["error"]:
            return "warning"
        return worst[0] if worst else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; ``strict_json`` converts numbers that are not finite."""
        return {
            "version": VERSION,
            "verdict": self.verdict,
            "mood": self.mood,
            "before": self.before,
            "after": self.after,
            "one_record": self.one_record,
            "alike": self.alike,
            "notes": list(self.notes),
            "caution": self.caution,
            "statuses": list(self.statuses),
            "endings": list(self.endings),
            "findings_known": list(self.findings_known),
            "shared_steps": self.shared_steps,
            **{status: [one.as_dict() for one in self._that_are(status)] for status in STATUSES},
            "setup": [one.as_dict() for one in self.setup],
            "numbers": [one.as_dict() for one in self.numbers],
            "layers": [one.as_dict() for one in self.layers],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }

    def _repr_html_(self) -> str:
        from ampwise.report.comparison.notebook import comparison_html

        return comparison_html(self)


def _one_record(before: Run, after: Run) -> bool:
    return Path(before.folder).resolve() == Path(after.folder).resolve()


def _notes(before: Run, after: Run, unlike: str) -> list[str]:
    notes = []
    other_script = not same_script(before, after)
    if unlike or other_script:
        parts = ["used different scripts"] * other_script + [unlike] * bool(unlike)
        notes.append(f"The two runs {' and '.join(parts)}{': no number is judged' if unlike else ''}.")
    for run in (after,) if _one_record(before, after) else (before, after):
        notes += [f"{run.folder}: {note}" for note in (ending(run), *run.trouble) if note]
    if not (before.findings_known and after.findings_known):
        notes.append("Some findings could not be read, so none is called new or gone.")
    return notes


def _unlike(layers: tuple[Sequence[LayerGradients], Sequence[LayerGradients]], in_common: int) -> str:
    """Say why two runs count as different models."""
    if not all(layers):
        return "do not both have layers in their records"
    if not in_common:
        return "have no layer in common"
    return f"have only {in_common:,} of {max(map(len, layers)):,} layers in common"


def _ended(run: Run) -> str:
    """Describe how a run ended, in a few words; empty if it ended well."""
    code, status = run.manifest.get("exit_code"), run.status
    words = {"failed": "failed", "interrupted": "was interrupted"}
    if status == "finished":
        how = f"ended with exit code {code}" if code else ""
    elif status.startswith("running"):
        how = {True: "is still going", False: "was killed", None: "is still going, or was killed,"}[run.alive]
    elif status == UNKNOWN:
        how = "ended in an unknown way"
    else:
        how = words.get(status, f"ended with the status {status!r}")
    return f"{how} after {_counted(steps_of(run), 'step')}" if how else ""


def _counted(number: int, noun: str = "finding") -> str:
    return f"{f'{number:,}' if number else 'no'} {noun}{'' if number == 1 else 's'}"
