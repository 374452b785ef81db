"""Findings of a running script: equal evidence is judged once and then counted; and what was found to be fine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding import Finding, Severity
from ampwise.finding.registry import run_checks
from ampwise.runs.files import read_json, write_atomically
from ampwise.runs.findings_json import findings_data
from ampwise.runs.layout import FINDINGS, LARGEST_MANIFEST, MANIFEST
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding
from ampwise.watch.gradient_health import GradientHealth
from ampwise.watch.run_events import ReplicaSum, RunEvents

__all__ = [
    "FROM_ANOTHER_RANK",
    "Findings",
    "add_findings_of_ranks",
    "is_cause",
    "list_passed_checks",
    "point_to_cause",
]

MOST = 1000  # findings of a run; more than these have a common cause
SYMPTOMS = ("AMP612", "AMP613")  # non-finite-loss, non-finite-gradients
SEE_OPERATION = "See the finding about the operation."
AFTER_MODEL = (
    "The model's output is finite: the bad value arises between it and the loss. Put that code into a function and run "
    "`ampwise.trace(loss_fn, x, y)`."
)
FROM_ANOTHER_RANK = "it came from another rank"  # one rank alone can only guess this
HALVES = ("fp16", "bf16")


class Findings:
    """Findings so far."""

    def __init__(self) -> None:
        self.on_new: Callable[[CountedFinding], None] = lambda seen: None  # called with each new finding
        self._seen: dict[Hashable, CountedFinding] = {}
        self._known: dict[Any, tuple[Hashable, ...]] = {}  # evidence judged before, and the findings it gave
        # Findings by source, of evidence that is judged again as it grows.
        self._by_source: dict[Hashable, dict[Hashable, CountedFinding]] = {}
        self.changed = False  # since the flag was last cleared

    def judge(self, evidence: Any, step: int | None = None) -> None:
        """Judge evidence by the rules; count evidence that is equal to earlier evidence."""
        keys = self._known.get(evidence)
        if keys is None:
            added = [self.add(finding, step) for finding in run_checks(evidence)]
            if len(self._known) < MOST * 10:
                self._known[evidence] = tuple(key for key in added if key is not None)
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
            if key not in before:
                self.on_new(now[key])
        self.changed |= bool(now or before)
        self._by_source[source] = now

    def add(self, finding: Finding, step: int | None = None) -> Hashable | None:
        """Add a finding, or count it once more. Return its key, or None if there are too many findings."""
        key = _key(finding)
        if key in self._seen:
            self._count(self._seen[key], step)
        elif len(self._seen) < MOST:
            self._seen[key] = CountedFinding(finding=finding, first_step=step, last_step=step)
            self.on_new(self._seen[key])
        else:
            return None
        self.changed = True
        return key

    def __iter__(self) -> Iterator[CountedFinding]:
        """Iterate by severity, causes before their consequences, then by count."""
        every = [*self._seen.values(), *(seen for given in self._by_source.values() for seen in given.values())]
        every.sort(key=lambda seen: (seen.finding.severity.rank, not seen.names_the_cause, -seen.count))
        return iter(every)

    def __len__(self) -> int:
        return len(self._seen) + sum(map(len, self._by_source.values()))

    def _count(self, seen: CountedFinding, step: int | None) -> None:
        seen.count += 1
        seen.last_step = step if step is not None else seen.last_step
        self.changed = True


def _key(finding: Finding) -> tuple[Hashable, ...]:
    """Return what identifies a finding: its rule and its place, without the numbers in its text."""
    place = finding.place
    return (finding.rule.code, place.file, place.line, place.module, place.parameter, place.device)


# Causes of a non-finite loss or gradients


def is_cause(finding: Finding) -> bool:
    """Whether the finding names the cause of a bad value, and does not just say that none was found."""
    return finding.rule.names_the_cause and finding.severity is Severity.ERROR


def point_to_cause(found: Iterable[CountedFinding], *, known: bool, after_model: bool = False) -> bool:
    """Give symptoms among the findings a more specific fix. Return whether any was changed.

    known: a finding names the cause. after_model: a replay has shown that the models' outputs are finite.
    """
    fix = SEE_OPERATION if known else AFTER_MODEL if after_model else ""
    symptoms = [seen for seen in found if fix and seen.finding.rule.code in SYMPTOMS]
    for seen in symptoms:
        seen.finding = seen.finding.but(fix=fix)
    return bool(symptoms)


def add_findings_of_ranks(folder: Path) -> None:
    """Judge the records of all ranks of a run that has ended, and write the findings to the first rank's part."""

    def write(path: Path, data: Any) -> None:
        write_atomically(path, [(json.dumps(data, indent=2, allow_nan=False) + "\n").encode()])

    try:
        run = Run.read(folder, layers_of_others=False)
    except BadInput:  # no process was started
        return
    together = Findings()
    together.judge_whole(RunEvents(scales_by_rank=run.scales_by_rank(), replicas=_replica_sums(run)))
    parts = [run, *run.ranks.values()]
    causes = [seen.finding for part in parts for seen in part.findings if is_cause(seen.finding)]
    explained = {finding.place.step for finding in causes}
    for part in parts:
        added = list(together) if part is run else []
        if point_to_cause(part.findings, known=bool(causes)) or added:
            write(part.folder / FINDINGS, findings_data([*part.findings, *added]))
        # Remove guesses that a step's NaN came from another rank, where that rank's record explains the step.
        sentences = part.facts.get("not_measured")
        left = []
        for sentence in sentences if isinstance(sentences, list) else ():
            step = re.match(r"Step (\d+) was replayed", str(sentence))
            if step is None or FROM_ANOTHER_RANK not in str(sentence) or int(step[1]) not in explained:
                left.append(sentence)
        if isinstance(sentences, list) and len(left) < len(sentences):
            manifest = read_json(part.folder / MANIFEST, LARGEST_MANIFEST)
            manifest["facts"]["not_measured"] = left
            write(part.folder / MANIFEST, manifest)


def _replica_sums(run: Run) -> dict[int, list[ReplicaSum]]:
    """Return the sums in the records of all ranks; those of a damaged record are left out."""
    found: dict[int, list[ReplicaSum]] = {}
    for rank, part in {run.rank: run, **run.ranks}.items():
        rows = part.facts.get("replicas")
        with suppress(TypeError, ValueError, KeyError):
            found[rank] = [
                ReplicaSum(
                    optimizer=int(row["optimizer"]),
                    step=int(row["step"]),
                    wrapped=row["wrapped"] is True,
                    weights=tuple(map(float, row["weights"])),
                    gradients=tuple(map(float, row["gradients"])),
                    firsts=tuple(map(float, row["firsts"])),
                    file=str(row["file"]),
                    line=int(row["line"]),
                )
                for row in (rows if isinstance(rows, list) else ())
            ]
    return found


def list_passed_checks(
    run: RunEvents, kinds: Mapping[str, int], seen: Sequence[CountedFinding], healths: Mapping[int, GradientHealth]
) -> list[str]:
    """Return a sentence for each check that applied to the run and passed. kinds: number of events by class."""
    if not run.steps:
        return []
    found = {each.finding.rule.code for each in seen}
    trained = {(forward.model, forward.precision) for forward in run.forwards if forward.training}
    evaluated = {(forward.model, forward.precision) for forward in run.forwards if not forward.training}
    precisions = {precision for _, precision in trained}  # of autocast, or of the parameters
    scaled = any(made.enabled for made in run.scalers)
    # Steps that a scaler skipped because gradients overflowed.
    skipped = any(streak.first_scale is not None for health in healths.values() for streak in health.streaks.all)
    sampled = bool(healths) and all(health.samples for health in healths.values())

    in_range = "Gradients stayed within their format's range"
    order = "AMP103 AMP104 AMP105 AMP106 AMP107 AMP110 AMP112 AMP113 AMP201 AMP203"
    backwards = "({n} backward passes)"
    # Whether the sentence applies, the event that must have happened, whose count is {n}, the rules (or prefixes of
    # their codes) that must not have found anything, and the sentence.
    claims = [
        (scaled, "Clip", "AMP101", "Gradients were unscaled when they were clipped ({n} times)."),
        (
            scaled and precisions == {"fp16"},
            "Backward",
            "AMP108 AMP109 AMP301 AMP302 AMP304 AMP308",
            f"Losses were scaled, as FP16 needs {backwards}.",
        ),
        (
            not run.scalers and not run.unused_scalers and precisions == {"bf16"},
            "Backward",
            "AMP302 AMP308",
            f"Losses were not scaled, which BF16 does not need {backwards}.",
        ),
        (
            not precisions.isdisjoint(HALVES),
            "Backward",
            "AMP111 AMP301 AMP304 AMP306",  # the last three: there may have been no autocast at all
            "Backward passes ran outside of autocast ({n} times).",
        ),
        (scaled, "ScalerUpdate", order, "The scaler's methods were called in the right order ({n} updates)."),
        (
            scaled and not kinds.get("OptimizerStep"),
            "ScalerStep",
            "AMP109 AMP110",
            "Every step went through the scaler ({n} steps).",
        ),
        (skipped, "SchedulerStep", "AMP114", "The scheduler did not advance on skipped steps."),
        (
            True,
            "Accumulation",
            "AMP205 AMP206",
            "No mean loss was left undivided where gradients were accumulated ({n} steps).",
        ),
        (scaled and any(save.scaler for save in run.saves), "", "AMP204", "Checkpoints contain the scaler's state."),
        (
            any(precision in HALVES for _, precision in trained & evaluated),
            "",
            "AMP501",
            "Evaluation ran in the precision of training.",
        ),
        (sampled and not skipped, "", "AMP6 AMP301", f"{in_range}."),
        (sampled and skipped, "", "AMP6 AMP301", f"{in_range}, except for overflows that the scaler handled."),
    ]
    return [
        sentence.format(n=kinds.get(event, 0))
        for applies, event, rules, sentence in claims
        if applies
        and (not event or kinds.get(event))
        and not any(code.startswith(tuple(rules.split())) for code in found)
    ]
