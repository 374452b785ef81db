"""Summarize a run in a line: how many findings, how serious, and in how many steps."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.finding import Finding, Severity
from ampwise.report.formatting import read_number
from ampwise.report.run_facts import passes_per_step, sentences, steps_of
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import Run
from ampwise.runs.rows import CountedFinding

REASONS = ("Nothing was watched", "Some calls could not be followed")  # notes that explain why nothing was measured
BLOCK = "block"  # the fact that a part of a script was watched
UNKNOWN = "unknown"  # the status of a record without one
RANKS_NAMED = 8  # ranks to list by number


def verdict(run: Run) -> str:
    """Return the run in a line, without its full stop; a failure of the script comes before the findings."""
    how = ending(run)
    return f"{how} {_judged(run)}" if how and _ended_badly(run) else _judged(run)


def opening(run: Run) -> list[str]:
    """Return the first sentences of every report: the findings, and how the run ended; a failure comes first."""
    how, judged = ending(run), f"{_judged(run)}."
    reasons = [one for one in sentences(run, "not_measured") if one.startswith(REASONS)] if is_empty_run(run) else []
    if is_empty_run(run) and how:
        return [how, *(reasons or [judged])]
    ordered = [how, judged] if _ended_badly(run) else [judged, how]
    return [sentence for sentence in [*ordered, *reasons] if sentence]


def is_empty_run(run: Run) -> bool:
    """Return whether the run took no step, and has no findings and no events."""
    return not (steps_of(run) or run.merged_findings() or run.events) and run.findings_known


def run_mood(run: Run) -> str:
    """Return how serious the run's state is: a severity, or "ok"; unreadable findings count as a warning."""
    if _ended_badly(run):
        return str(Severity.ERROR)
    findings = worst_first(run.merged_findings())
    worst = findings[0].finding.severity if findings else None
    if (not run.findings_known or run.status == UNKNOWN) and worst is not Severity.ERROR:
        return str(Severity.WARNING)
    return str(worst) if worst is not None else str(Severity.INFO) if is_empty_run(run) else "ok"


def _judged(run: Run) -> str:
    findings = worst_first(run.merged_findings())
    steps = steps_of(run)
    script = run.manifest.get("script") or ("a script without a name" if run.manifest else "an unknown script")
    if run.facts.get("watched") == BLOCK:
        script = f"the watched block of {script}"
    where = f"{_counted(steps, 'step')} of {script}" if steps else f"{script}, which took no step"
    passes = read_number(run.facts.get("backward_passes"))
    if not steps and passes:
        where = f"{script}: {_counted(int(passes), 'backward pass')}, but no optimizer stepped"
    about = f"{where}{setup_of(run)}"
    if not findings and not run.findings_known:
        return f"The findings of {about}{'' if steps else ','} could not {'all ' if run.ranks else ''}be read"
    if not findings:
        return f"{'No findings' if steps else 'Nothing to judge'} in {about}"
    more = "" if run.findings_known else ", and more that could not be read,"
    counted = count_by_severity([one.finding for one in findings])
    if "," not in counted:
        return f"{counted}{more} in {about}"
    return f"{_counted(len(findings), 'problem')}{more} in {about}: {counted}"


def setup_of(run: Run) -> str:
    """Return the precision, scaler, ranks and accumulation: " (fp16, scaler)"; empty if none is known."""
    precision = run.facts.get("precision")
    scaler = "scaler" if any(bucket.scale.known for bucket in run.steps) else ""
    ranks = f"{1 + len(run.ranks):,} ranks" if run.ranks else ""
    passes = passes_per_step(run)
    summed = f"{passes} backward passes per step, whose losses are added up" if passes > 1 else ""
    known = ", ".join(part for part in (str(precision or ""), scaler, ranks, summed) if part)
    return f" ({known})" if known else ""


def _ended_badly(run: Run) -> bool:
    killed = run.status.startswith("running") and run.alive is False
    return killed or run.status == "failed" or (run.status == "finished" and bool(run.manifest.get("exit_code")))


def ending(run: Run) -> str:
    """Describe how the script ended; empty for one that finished with exit code 0."""
    code = run.manifest.get("exit_code")
    status = run.status
    if status == "finished":
        return "" if not code else f"The script ended with exit code {code}."
    if status == "failed":
        error = run.manifest.get("error")
        parts = [str(error[part]) for part in ("type", "message") if error.get(part)] if isinstance(error, dict) else []
        text = f" with {': '.join(parts).rstrip('.')}" if parts else ""
        what = "watched block" if run.facts.get("watched") == BLOCK else "script"
        return f"The {what} failed{text}{'' if code is None else f' (exit code {code})'}."
    if status == "interrupted":
        return "The run was interrupted; this is what it had recorded until then."
    if status.startswith("running"):
        return {
            None: "The run is still going or was killed: its record has no end. This is what it has recorded so far.",
            True: "The run is still going; this is what it has recorded so far.",
            False: "The run was killed before it could finish its record; this is what it had recorded.",
        }[run.alive]
    if status == UNKNOWN:
        return f"How the run ended is unknown{'' if run.manifest else ': its manifest could not be read'}."
    return f"The run ended with the status {status!r}."


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


# --- findings ------------------------------------------------------------------------------------------------------


def worst_first(findings: Sequence[CountedFinding]) -> list[CountedFinding]:
    """Sort findings: errors, warnings, advice; within these, the most frequent first, then the earliest."""

    def badness(counted: CountedFinding) -> tuple[object, ...]:
        finding, place = counted.finding, counted.finding.place
        first = float("inf") if counted.first_step is None else counted.first_step
        how_bad = (finding.severity.rank, not counted.names_the_cause, -counted.count, first, finding.rule.code)
        return (*how_bad, place.file or "", place.line or 0, place.parameter or "", finding.message)

    return sorted(findings, key=badness)


def count_by_severity(findings: Sequence[Finding]) -> str:
    """Count the findings by severity: "3 errors, 1 note"."""
    numbers = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    return ", ".join(_counted(number, severity.word) for severity, number in numbers.items() if number)


def occurrence(counted: CountedFinding) -> str:
    """Describe how often, at which steps and on which ranks: "120 times, steps 1 to 120".

    Empty for a finding that occurred once and at no step. Not every bad step is replayed.
    """
    first, last, parts = counted.first_step, counted.last_step, []
    if counted.count > 1:
        what = "in {:,} replays" if counted.finding.rule.names_the_cause else "{:,} times"
        parts.append(what.format(counted.count))
    if first is not None and last is not None and first != last:
        parts.append(f"steps {first:,} to {last:,}")
    elif first is not None:
        parts.append(f"at step {first:,}" if counted.count == 1 else f"first at step {first:,}")
    if len(counted.ranks) > 1:
        named = ", ".join(str(rank) for rank in counted.ranks[:RANKS_NAMED])
        more = len(counted.ranks) - RANKS_NAMED
        parts.append(f"on ranks {named}{f' and {more} more' if more > 0 else ''}")
    return ", ".join(parts)


# --- events --------------------------------------------------------------------------------------------------------


def latest_events(run: Run, most: int) -> tuple[list[tuple[LoggedEvent, str]], int]:
    """Return the last events in order, each with the advice to show, and how many earlier ones there are.

    Advice is shown once for each kind of event, with the last one.
    """
    shown = run.events[-most:]
    last = {event.name: number for number, event in enumerate(shown)}
    advised = [(event, event.advice if last[event.name] == number else "") for number, event in enumerate(shown)]
    return advised, len(run.events) - len(shown)


def event_lines(run: Run, most: int) -> list[str]:
    """Return the last events as sentences, after one that counts the earlier ones."""
    shown, earlier = latest_events(run, most)
    lines = [f"{event}{f'. {advice}' if advice else ''}" for event, advice in shown]
    return [*([f"{earlier:,} earlier ones: the JSON has all of them"] if earlier else []), *lines]
