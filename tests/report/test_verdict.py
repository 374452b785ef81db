"""The verdict: counts, order, and how a run ended."""

import os
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.finding import Place, Rule, Severity
from ampwise.report.run_facts import skip_rate, steps_of
from ampwise.report.verdict import (
    count_by_severity,
    ending,
    occurrence,
    opening,
    run_mood,
    verdict,
    worst_first,
)
from ampwise.rules.amp9xx_nan import half_overflow
from ampwise.runs.rows import CountedFinding

from ..for_each import for_each


def rule(severity, code="AMP799", summary="Something is off."):
    return Rule(code=code, name="odd", severity=severity, summary=summary, why="w", fix="f", bad="b", good="g")


def seen(severity, count=1, first=None, last=None, ranks=(0,)):
    finding = rule(severity).at(Place(file="t.py", line=1), "m")
    return CountedFinding(finding=finding, count=count, first_step=first, last_step=last, ranks=list(ranks))


MANY = st.lists(
    st.builds(seen, st.sampled_from(Severity), st.integers(1, 9), st.none() | st.integers(1, 9)), max_size=12
)


def test_the_verdict_counts_problems_by_severity(make_run):
    assert verdict(make_run()) == "2 problems in 120 steps of train.py (fp16, scaler): 1 error, 1 warning"
    notes = [seen(Severity.INFO), CountedFinding(finding=rule(Severity.INFO).at(Place(), "n"))]
    assert verdict(make_run(findings=notes)) == "2 notes in 120 steps of train.py (fp16, scaler)"


def test_nothing_found_is_said_calmly(make_run):
    assert verdict(make_run(findings=[])) == "No findings in 120 steps of train.py (fp16, scaler)"


def test_a_run_that_never_trained(make_run):
    run = make_run(findings=[], steps=[], manifest={"facts": {}})
    assert verdict(run) == "Nothing to judge in train.py, which took no step"
    assert run_mood(run) == "info"


def test_weights_that_a_script_updates_itself_are_no_idle_run(make_run):
    run = make_run(findings=[], steps=[], manifest={"facts": {"backward_passes": 536}})
    assert verdict(run) == "Nothing to judge in train.py: 536 backward passes, but no optimizer stepped"
    damaged = make_run(findings=[], steps=[], manifest={"facts": {"backward_passes": "many"}})
    assert verdict(damaged) == "Nothing to judge in train.py, which took no step"


WATCHED = "Nothing was watched: the script never imported torch."
JUDGED = "Nothing to judge in train.py, which took no step."
FAILED = "The script failed with ValueError: no data (exit code 1)."


@pytest.mark.parametrize(
    ("ended", "not_measured", "told"),
    [
        ({"status": "finished"}, ["Activations."], [JUDGED]),
        ({"status": "finished"}, [WATCHED], [JUDGED, WATCHED]),
        ({"status": "failed"}, [WATCHED], [FAILED, WATCHED]),
        ({"status": "failed"}, ["Activations."], [FAILED, JUDGED]),
        ({"status": "interrupted"}, [], ["The run was interrupted; this is what it had recorded until then.", JUDGED]),
    ],
)
def test_how_a_run_ended_and_why_nothing_was_seen(make_run, ended, not_measured, told):
    error = (
        {"exit_code": 1, "error": {"type": "ValueError", "message": "no data"}} if "failed" in ended.values() else {}
    )
    run = make_run(findings=[], steps=[], manifest={"facts": {"not_measured": not_measured}, **ended, **error})
    assert opening(run) == told


@pytest.mark.parametrize(
    "ended",
    [
        {"status": "failed", "exit_code": 1},
        {"status": "finished", "exit_code": 3},
        {"status": "running", "host": platform.node(), "pid": 2**31 - 1},
    ],
)
def test_a_bad_end_comes_before_no_findings(make_run, ended):
    run = make_run(findings=[], manifest=ended)
    assert opening(run) == [ending(run), "No findings in 120 steps of train.py (fp16, scaler)."]
    assert verdict(run) == f"{ending(run)} No findings in 120 steps of train.py (fp16, scaler)"
    assert run_mood(run) == "error"


def test_steps_are_counted_where_the_manifest_does_not_say(make_run):
    assert steps_of(make_run(facts={"steps": 7})) == 7
    assert steps_of(make_run(facts={"steps": None})) == 120
    assert steps_of(make_run(facts={"steps": True})) == 120
    assert steps_of(make_run(manifest={"facts": "broken"})) == 120


def test_the_steps_of_a_run_are_those_of_the_optimizer_that_took_the_most(make_run, make_steps):
    """As the manifest says it at the end: a run that was killed counts no other way."""
    steps = [*make_steps(30), *make_steps(50, optimizer=1)]
    assert steps_of(make_run(facts={"steps": None}, steps=steps)) == 50
    assert skip_rate(steps) == 1 / 80
    assert skip_rate([]) is None


def test_findings_that_could_not_be_read_are_no_good_news(make_run):
    run = make_run(findings=[], findings_known=False)
    assert verdict(run) == "The findings of 120 steps of train.py (fp16, scaler) could not be read"
    assert run_mood(run) == "warning"
    assert verdict(make_run(findings=[], findings_known=False, ranks={1: make_run(findings=[])})).endswith(
        "could not all be read"
    )
    part = make_run(findings=make_run().findings[:1], findings_known=False)
    assert verdict(part).startswith("1 warning, and more that could not be read, in 120 steps of train.py")
    assert run_mood(part) == "warning"
    assert run_mood(make_run(findings_known=False)) == "error"
    idle = make_run(findings=[], findings_known=False, steps=[], manifest={"facts": {}})
    assert opening(idle) == ["The findings of train.py, which took no step, could not be read."]
    assert run_mood(idle) == "warning"


def test_a_record_without_its_manifest(make_run):
    run = make_run(findings=[])
    run.manifest.clear()
    assert opening(run) == [
        "No findings in 120 steps of an unknown script (scaler).",
        "How the run ended is unknown: its manifest could not be read.",
    ]
    assert run_mood(run) == "warning"


@given(MANY)
def test_worst_first_is_an_order_of_the_same_findings(findings):
    ordered = worst_first(findings)
    assert sorted(map(id, ordered)) == sorted(map(id, findings))
    keys = [(one.finding.severity.rank, -one.count) for one in ordered]
    assert keys == sorted(keys)


@given(MANY)
def test_the_numbers_add_up(findings):
    told = count_by_severity([one.finding for one in findings])
    assert sum(int(part.split()[0]) for part in told.split(", ") if part) == len(findings)


@for_each(
    ("one", "told"),
    [
        (seen(Severity.INFO), ""),
        (seen(Severity.INFO, 1, 7, 7), "at step 7"),
        (seen(Severity.INFO, 1200, 1, 1200), "1,200 times, steps 1 to 1,200"),
        (seen(Severity.INFO, 3, 2), "3 times, first at step 2"),
        (seen(Severity.INFO, 2, ranks=(0, 3)), "2 times, on ranks 0, 3"),
        (seen(Severity.INFO, 9, ranks=range(10)), "9 times, on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_how_often(one, told):
    assert occurrence(one) == told


def test_of_an_operation_replays_are_counted_and_not_steps():
    one = CountedFinding(finding=half_overflow.RULE.at(Place(), "m"), count=5, first_step=13, last_step=28)
    assert occurrence(one) == "in 5 replays, steps 13 to 28"


@pytest.mark.parametrize(
    ("status", "more", "told"),
    [
        ("finished", {"exit_code": 0}, ""),
        ("finished", {"exit_code": 3}, "The script ended with exit code 3."),
        (
            "failed",
            {"exit_code": 1, "error": {"type": "ValueError", "message": "no data."}},
            "The script failed with ValueError: no data (exit code 1).",
        ),
        ("failed", {"exit_code": None, "error": None}, "The script failed."),
        ("interrupted", {}, "The run was interrupted; this is what it had recorded until then."),
        (
            "running",
            {},
            "The run is still going or was killed: its record has no end. This is what it has recorded so far.",
        ),
    ],
)
def test_how_it_ended(make_run, status, more, told):
    assert ending(make_run(manifest={"status": status, **more})) == told


def test_a_run_known_to_be_alive_or_dead(make_run):
    here = {"status": "running", "host": platform.node()}
    assert ending(make_run(manifest=here | {"pid": os.getpid()})).startswith("The run is still going;")
    assert ending(make_run(manifest=here | {"pid": 2**31 - 1})) == (
        "The run was killed before it could finish its record; this is what it had recorded."
    )


def test_ranks_are_counted(make_run):
    assert "(fp16, scaler, 3 ranks)" in verdict(make_run(ranks={1: make_run(), 2: make_run(findings=[])}))
