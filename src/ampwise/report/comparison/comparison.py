"""Compare two runs: which findings are gone or new, and which numbers have changed by more than noise."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampwise.finding.strict_json import SCHEMA_VERSION
from ampwise.finding.terminal import shortened
from ampwise.report.comparison.matches import (
    STATUSES,
    ComparedFinding,
    ComparedLayer,
    are_alike,
    compared_findings,
    compared_layers,
    file_name,
    only_in,
)
from ampwise.report.comparison.numbers import SEED_WARNING, UNCLEAR, ComparedNumber, compared_numbers, steps_in_common
from ampwise.report.formatting import format_short
from ampwise.report.layers import layers_of
from ampwise.report.run_facts import environment, mapping, settings, steps_of
from ampwise.report.verdict import UNKNOWN, ending
from ampwise.runs.reader import Run

# The numbers that decide between better and worse. The time per step is not among them: a busy machine changes it.
LOSSES = ("loss_at_end", "losses_not_finite")
VERSIONS = ("torch", "cuda", "ampwise", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupDifference:
    """A setting that differs between two runs; None if a run has not recorded it."""

    what: str
    before: str | None
    after: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


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

    def __repr__(self) -> str:
        return shortened(f"<Comparison of {self.before} with {self.after}: {self.verdict}>")

    @classmethod
    def of(cls, before: Run, after: Run) -> Comparison:
        """Compare two runs, of the same script or of different ones."""
        layers = (layers_of(before), layers_of(after))
        shared = compared_layers(*layers)
        same_script = file_name(before.manifest.get("script")) == file_name(after.manifest.get("script"))
        # Runs that sampled no layers are matched by script name; many scripts are called train.py.
        alike = are_alike(*layers, len(shared)) if all(layers) else same_script
        one_record = Path(before.folder).resolve() == Path(after.folder).resolve()
        unlike = f"have only {len(shared):,} of {max(map(len, layers)):,} layers in common"
        if not shared:
            unlike = "have no layer in common" if all(layers) else "do not both have layers in their records"
        differences = ([] if same_script else ["used different scripts"]) + ([] if alike else [unlike])
        notes = []
        if differences:
            notes.append(f"The two runs {' and '.join(differences)}{'' if alike else ': no number is judged'}.")
        for run in (after,) if one_record else (before, after):
            notes += [f"{run.folder}: {note}" for note in (ending(run), *run.trouble) if note]
        if not (before.findings_known and after.findings_known):
            notes.append("Some findings could not be read, so none is called new or gone.")
        return cls(
            before=str(before.folder),
            after=str(after.folder),
            findings=tuple(compared_findings(before, after)),
            setup=tuple(_setup_differences(before, after)),
            numbers=tuple(compared_numbers(before, after, layers, judge=alike)),
            layers=tuple(shared),
            only_before=tuple(only_in(layers[0], layers[1])),
            only_after=tuple(only_in(layers[1], layers[0])),
            shared_steps=steps_in_common(before, after),
            one_record=one_record,
            alike=alike,
            notes=tuple(notes),
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
        parts = [*badly, self._about_findings()]
        loss = next((one for one in self.numbers if one.key == "loss_at_end"), None)
        if self.alike and loss is not None and loss.before is not None and loss.after is not None:
            values = f"{loss.written(loss.after)} against {loss.written(loss.before)}"
            unclear = f", {UNCLEAR}" if loss.judged == UNCLEAR else ""
            of = f" of {loss.owner}" if loss.owner else ""
            parts.append(f"loss{of} after {_counted(self.shared_steps, 'step')} {values}{unclear}")
        return "; ".join(parts)

    def _about_findings(self) -> str:
        old = sum(one.before is not None for one in self.findings)
        new = sum(one.after is not None for one in self.findings)
        if not all(self.findings_known):
            parts = []
            for name, count, known in zip((self.before, self.after), (old, new), self.findings_known, strict=True):
                unread = f"the findings of {name} could not {'all ' if count else ''}be read"
                parts.append(f"{name} has {_counted(count)}" if known else unread)
            return "; ".join(parts)
        if not old and not new:
            return f"neither {self.before} nor {self.after} has findings"
        if not self.gone and not self.new:
            return f"{self.after} has the {_counted(new)} that {self.before} has"
        changed = f"{len(self.gone) or 'none'} gone, {len(self.new) or 'none'} new"
        return f"{self.after} has {_counted(new)} where {self.before} had {old or 'none'}: {changed}"

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
            "version": SCHEMA_VERSION,
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
        from ampwise.report.notebook import comparison_html

        return comparison_html(self)


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


# --- setup ---------------------------------------------------------------------------------------------------------


def _setup_differences(before: Run, after: Run) -> list[SetupDifference]:
    """Return what differs, the most important first; last, GradScaler settings that were suggested differently."""
    old, new = _setup(before), _setup(after)
    found = [SetupDifference(what=what, before=old[what], after=new[what]) for what in old if old[what] != new[what]]
    # Only a run that reached its end has recorded suggestions, and there may be none.
    none = ["none" if "settings" in run.facts else None for run in (before, after)]
    asked, now_asked = ({one.name: format_short(one.value) for one in settings(run)} for run in (before, after))
    suggested = [
        SetupDifference(what=f"suggested {name}", before=asked.get(name, none[0]), after=now_asked.get(name, none[1]))
        for name in dict.fromkeys([*asked, *now_asked])
        if asked.get(name) != now_asked.get(name)
    ]
    return found + suggested


def _setup(run: Run) -> dict[str, str | None]:
    """Return the script, its arguments, the precision, versions and devices; None for what is unknown."""
    where, command, script = environment(run), run.manifest.get("command"), run.manifest.get("script")
    arguments = None
    if isinstance(command, list):  # the script's own, without ampwise's, which come before the script in the command
        words = [str(word) for word in command]
        arguments = shlex.join(words[words.index(script) + 1 :] if script in words else words) or "none"
    device, devices = mapping(run, "timing").get("device"), where.get("devices")
    if isinstance(devices, (list, tuple)) and devices:
        counts = Counter(map(str, devices))
        device = ", ".join(name if times == 1 else f"{times} × {name}" for name, times in counts.items())
    scaled = any(bucket.scale.known for bucket in run.steps)
    values = {
        "script": script,
        "arguments": arguments,
        "precision": run.facts.get("precision"),
        "loss scale": ("in use" if scaled else "none") if run.steps else None,
        "device": None if device is None else str(device),
        "processes": run.manifest.get("world_size"),
        **{name: where.get(name) for name in VERSIONS},
        "platform": where.get("platform"),
    }
    # Strings are not shortened: two long ones could become equal.
    return {
        what: value if value is None or isinstance(value, str) else format_short(value)
        for what, value in values.items()
    }
