"""How a run went, in a line: how many findings, how bad, in how many steps, and what the worst of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.finding import Finding, Severity
from ampwise.report.facts import sentences

if TYPE_CHECKING:
    from ampwise.record.bucket import Bucket
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = [
    "UNKNOWN",
    "ending",
    "happened",
    "how_many",
    "mood",
    "nothing_seen",
    "opening",
    "setup",
    "skip_rate",
    "steps_of",
    "verdict",
    "worst_first",
]

REASONS = ("Nothing was watched", "Some calls could not be followed")  # of all that was not measured, why nothing was
UNKNOWN = "unknown"  # the status of a record that does not say
RANKS_NAMED = 8  # of a thousand ranks nobody reads the list


def worst_first(seen: Sequence[Seen]) -> list[Seen]:
    """Errors before warnings before advice; of equals what happened most often, then what happened first."""
    return sorted(seen, key=_badness)


def verdict(run: Run) -> str:
    """The run in a line, without its full stop; that a script failed comes before what was found in it."""
    how = ending(run)
    return f"{how} {_judged(run)}" if how and _ended_badly(run) else _judged(run)


def opening(run: Run) -> list[str]:
    """The first sentences of every report: what was found, and how the run ended; a failure first."""
    how, judged = ending(run), f"{_judged(run)}."
    reasons = [one for one in sentences(run, "not_measured") if one.startswith(REASONS)] if nothing_seen(run) else []
    if nothing_seen(run) and how:
        return [how, *(reasons or [judged])]
    told = [how, judged] if _ended_badly(run) else [judged, how]
    return [sentence for sentence in [*told, *reasons] if sentence]


def nothing_seen(run: Run) -> bool:
    """No step, and nothing found."""
    return not steps_of(run) and not run.merged_findings() and run.findings_known


def mood(run: Run) -> str:
    """How bad it is: a severity, or "ok"; what could not be read may have been bad."""
    if _ended_badly(run):
        return str(Severity.ERROR)
    seen = worst_first(run.merged_findings())
    worst = seen[0].finding.severity if seen else None
    if (not run.findings_known or run.status == UNKNOWN) and worst is not Severity.ERROR:
        return str(Severity.WARNING)
    return str(worst) if worst is not None else str(Severity.INFO) if nothing_seen(run) else "ok"


def _judged(run: Run) -> str:
    seen = worst_first(run.merged_findings())
    steps = steps_of(run)
    where = f"{_counted(steps, 'step')} of {script_of(run)}" if steps else f"{script_of(run)}, which took no step"
    about = f"{where}{setup(run)}"
    if not seen and not run.findings_known:
        return f"The findings of {about}{'' if steps else ','} could not {'all ' if run.ranks else ''}be read"
    if not seen:
        return f"{'No findings' if steps else 'Nothing to judge'} in {about}"
    more = "" if run.findings_known else ", and more that could not be read,"
    return f"{how_many([one.finding for one in seen])}{more} in {about}: {_headline(seen[0].finding)}"


def _ended_badly(run: Run) -> bool:
    killed = run.status.startswith("running") and run.alive is False
    return killed or run.status == "failed" or (run.status == "finished" and bool(run.manifest.get("exit_code")))


def how_many(findings: Sequence[Finding]) -> str:
    """The findings by severity: "3 errors, 1 warning"."""
    numbers = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    parts = [
        f"{number} {severity}" if severity is Severity.INFO else _counted(number, str(severity))
        for severity, number in numbers.items()
        if number
    ]
    return ", ".join(parts)


def happened(seen: Seen) -> str:
    """How often, from when to when, and where among the ranks: "×120, first at step 1, last at step 120".

    Empty for what was seen once and at no step: that goes without saying. Not every bad step is replayed.
    """
    often = f"in {seen.count:,} replays" if seen.finding.rule.names_the_cause else f"×{seen.count:,}"
    told = ["once" if seen.count == 1 else often]
    if seen.first_step is not None and seen.first_step == seen.last_step:
        told.append(f"at step {seen.first_step:,}")
    elif seen.first_step is not None:
        told.append(f"first at step {seen.first_step:,}")
        told += [f"last at step {seen.last_step:,}"] if seen.last_step is not None else []
    if len(seen.ranks) > 1:
        named = ", ".join(str(rank) for rank in seen.ranks[:RANKS_NAMED])
        more = len(seen.ranks) - RANKS_NAMED
        told.append(f"on ranks {named}{f' and {more} more' if more > 0 else ''}")
    return "" if told == ["once"] else ", ".join(told)


def steps_of(run: Run) -> int:
    """The steps of the optimizer that took the most, skipped ones too: what a person calls the steps of a run."""
    said = run.facts.get("steps")
    if isinstance(said, int) and not isinstance(said, bool) and said >= 0:
        return said
    taken: Counter[int] = Counter()  # a run that is not over has not said it
    for bucket in run.steps:
        taken[bucket.optimizer] += bucket.count
    return max(taken.values(), default=0)


def skip_rate(steps: Sequence[Bucket]) -> float | None:
    """The share skipped of all steps of all optimizers; None where there is none."""
    taken = sum(bucket.count for bucket in steps)
    return sum(bucket.skipped for bucket in steps) / taken if taken else None


def script_of(run: Run) -> str:
    """The script that ran."""
    nameless = "a script without a name" if run.manifest else "an unknown script"
    return str(run.manifest.get("script") or nameless)


def setup(run: Run) -> str:
    """The precision, whether a scaler was at work, how many ranks: " (fp16, scaler)"; nothing where none is known."""
    precision = run.facts.get("precision")
    scaler = "scaler" if any(bucket.scale.known for bucket in run.steps) else ""
    ranks = f"{1 + len(run.ranks):,} ranks" if run.ranks else ""
    known = ", ".join(part for part in (str(precision or ""), scaler, ranks) if part)
    return f" ({known})" if known else ""


def ending(run: Run) -> str:
    """How the script ended where that is worth a line; empty for one that finished with exit code 0."""
    code = run.manifest.get("exit_code")
    status = run.status
    if status == "finished":
        return "" if not code else f"The script ended with exit code {code}."
    if status == "failed":
        return f"The script failed{_error(run)}{'' if code is None else f' (exit code {code})'}."
    if status == "interrupted":
        return "The run was interrupted; this is what it had seen until then."
    if status.startswith("running"):
        return _unfinished(run.alive)
    if status == UNKNOWN:
        return f"How the run ended is not known{'' if run.manifest else ': its manifest could not be read'}."
    return f"The run ended as {status!r}."


def _unfinished(alive: bool | None) -> str:
    if alive is None:
        return "The run is still going, or was killed: it wrote no end. This is what it has written so far."
    if alive:
        return "The run is still going: this is what it has written so far."
    return "The run was killed before it could write its end; this is what it had written."


def _error(run: Run) -> str:
    error = run.manifest.get("error")
    if not isinstance(error, dict):
        return ""
    told = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part))
    return f" with {told.rstrip('.')}" if told else ""


def _badness(seen: Seen) -> tuple[object, ...]:
    finding, place = seen.finding, seen.finding.place
    first = float("inf") if seen.first_step is None else seen.first_step
    where = (place.file or "", place.line or 0, place.parameter or "")
    return (
        finding.severity.rank,
        not finding.rule.names_the_cause,
        -seen.count,
        first,
        finding.rule.code,
        *where,
        finding.message,
    )


def _headline(finding: Finding) -> str:
    """The rule's summary as the end of a sentence: a plain first word loses its capital, a name keeps it."""
    text = finding.rule.summary.strip().rstrip(".")
    first = text.split(maxsplit=1)[0]
    return text[:1].lower() + text[1:] if len(first) == 1 or first[1:].islower() else text


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
