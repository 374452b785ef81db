"""Two runs beside each other: what is gone, what is new, which numbers have changed, and which only seem so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampwise.report.comparison.findings import ComparedFinding, compared_findings
from ampwise.report.comparison.layers import ComparedLayer, compared_layers, only_in
from ampwise.report.comparison.numbers import UNCLEAR, ComparedNumber, compared_numbers, steps_in_common
from ampwise.report.comparison.setup import Difference, differences, same_script
from ampwise.report.layers import layers_of
from ampwise.report.verdict import ending, steps_of

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["VERSION", "Comparison"]

VERSION = 1
_UNLIKE = "The two ran different scripts and have no layer in common: no number is judged."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one run to another."""

    before: str  # the folders
    after: str
    findings: tuple[ComparedFinding, ...] = ()
    setup: tuple[Difference, ...] = ()
    numbers: tuple[ComparedNumber, ...] = ()
    layers: tuple[ComparedLayer, ...] = ()  # that both have, what changed the most first
    only_before: tuple[str, ...] = ()  # layers
    only_after: tuple[str, ...] = ()
    shared_steps: int = 0  # up to which both have come: losses are compared there
    one_record: bool = False  # compared with itself
    alike: bool = True  # the same script, or layers in common: without either, no number is better than another
    notes: tuple[str, ...] = ()  # what a reader has to know first: sentences
    endings: tuple[str, str] = ("", "")  # "failed after 3 steps"; empty for a run that ended well

    @classmethod
    def of(cls, before: Run, after: Run) -> Comparison:
        """Compare two runs, whatever they ran."""
        layers = (layers_of(before), layers_of(after))
        shared = compared_layers(*layers)
        alike = same_script(before, after) or bool(shared)
        return cls(
            before=str(before.folder),
            after=str(after.folder),
            findings=tuple(compared_findings(before, after)),
            setup=tuple(differences(before, after)),
            numbers=tuple(compared_numbers(before, after, layers, judge=alike)),
            layers=tuple(shared),
            only_before=tuple(only_in(layers[0], layers[1])),
            only_after=tuple(only_in(layers[1], layers[0])),
            shared_steps=steps_in_common(before, after),
            one_record=_one_record(before, after),
            alike=alike,
            notes=tuple(_notes(before, after, alike)),
            endings=(_ended(before), _ended(after)),
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
        """Findings of both."""
        return self._that_are("still")

    def _that_are(self, status: str) -> list[ComparedFinding]:
        return [one for one in self.findings if one.status == status]

    @property
    def verdict(self) -> str:
        """The comparison in a sentence, without its full stop."""
        if self.one_record:
            return f"{self.after} is compared with itself; it has {_counted(len(self.findings))}"
        names = (self.before, self.after)
        badly = [f"{name} {how}" for name, how in zip(names, self.endings, strict=True) if how]
        return "; ".join([*badly, self._about_findings(), *self._about_loss()])

    def _about_findings(self) -> str:
        old, new = len(self.gone) + len(self.still), len(self.new) + len(self.still)
        if not old and not new:
            return f"neither {self.before} nor {self.after} has findings"
        if not self.gone and not self.new:
            return f"{self.after} has the {_counted(new)} that {self.before} has"
        changed = f"{len(self.gone) or 'none'} gone, {len(self.new) or 'none'} new"
        return f"{self.after} has {_counted(new)} where {self.before} had {old or 'none'}: {changed}"

    def _about_loss(self) -> list[str]:
        loss = next((one for one in self.numbers if one.key == "loss_at_end"), None)
        if not self.alike or loss is None or loss.before is None or loss.after is None:
            return []
        values = f"{loss.written(loss.after)} against {loss.written(loss.before)}"
        unclear = f", {UNCLEAR}" if loss.judged == UNCLEAR else ""
        return [f"loss after {_counted(self.shared_steps, 'step')} {values}{unclear}"]

    @property
    def mood(self) -> str:
        """How the later run looks beside the earlier: a severity, or "ok"."""
        worst = [str(one.seen.finding.severity) for one in self.new]  # worst first
        worse = any(one.judged == "worse" for one in self.numbers)
        if self.endings[1] and not self.endings[0]:
            return "error"
        return worst[0] if worst else "warning" if worse else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``strict_json`` takes care of numbers that are not finite."""
        return {
            "version": VERSION,
            "verdict": self.verdict,
            "before": self.before,
            "after": self.after,
            "one_record": self.one_record,
            "alike": self.alike,
            "notes": list(self.notes),
            "shared_steps": self.shared_steps,
            **{status: [one.as_dict() for one in self._that_are(status)] for status in ("new", "gone", "still")},
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


def _notes(before: Run, after: Run, alike: bool) -> list[str]:
    notes = []
    if not same_script(before, after):
        notes.append("The two ran different scripts." if alike else _UNLIKE)
    for run in (after,) if _one_record(before, after) else (before, after):
        notes += [f"{run.folder}: {said}" for said in (ending(run), *run.trouble) if said]
    return notes


def _ended(run: Run) -> str:
    """How a run ended that did not end well, in a few words."""
    code, status = run.manifest.get("exit_code"), run.status
    words = {"failed": "failed", "interrupted": "was interrupted"}
    if status == "finished":
        how = f"ended with exit code {code}" if code else ""
    elif status.startswith("running"):
        how = {True: "is still going", False: "was killed", None: "is still going, or was killed,"}[run.alive]
    else:
        how = words.get(status, f"ended as {status!r}")
    return f"{how} after {_counted(steps_of(run), 'step')}" if how else ""


def _counted(number: int, noun: str = "finding") -> str:
    return f"{f'{number:,}' if number else 'no'} {noun}{'' if number == 1 else 's'}"
