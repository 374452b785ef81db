"""The report for machines, held to a schema."""

import json
import math

import pytest
from jsonschema import Draft202012Validator

from ampwise.cli.schema import SCHEMAS
from ampwise.finding import Place
from ampwise.numbers.census.algebra import Census
from ampwise.report.as_json import MOST_ROWS, as_json
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import CountedFinding, StepBucket, StepRow

SCHEMA = json.loads((SCHEMAS / "report.json").read_text())


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def read(run):
    """The report, parsed strictly and held to the schema."""
    data = json.loads(as_json(run), parse_constant=refuse)
    Draft202012Validator(SCHEMA).validate(data)
    return data


def test_events_are_there_in_order(make_run):
    skipped = LoggedEvent(name="step-skipped", level="info", message="skipped", step=7, fields={"loss": math.nan})
    failed = LoggedEvent(name="sink-failed", level="warning", message="the sink `a` failed", advice="Fix it.")
    data = read(make_run(events=[skipped, failed]))
    assert [event["name"] for event in data["events"]] == ["step-skipped", "sink-failed"]
    assert (data["events"][0]["fields"], data["events"][1]["step"]) == ({"loss": "NaN"}, None)


def test_the_schema_holds_and_findings_come_worst_first(make_run):
    data = read(make_run())
    assert [one["code"] for one in data["findings"]] == ["AMP101", "AMP204"]
    clip = data["findings"][0]
    assert clip["place"] == {"file": "train.py", "line": 31}
    assert (clip["count"], clip["first_step"], clip["last_step"], clip["ranks"]) == (120, 1, 120, [0])
    assert clip["evidence"]["norm"] == 1.52587890625e-05
    assert data["settings"] == [{"name": "init_scale", "value": 32768.0, "reason": "65536 overflowed twice."}]
    assert data["environment"]["gpu"]["name"] == "H200"
    assert data["facts"]["precision"] == "fp16"


def test_the_steps_are_all_there(make_run):
    rows = read(make_run())["metrics"]["steps"]
    assert len(rows) == 120
    assert rows[6]["loss"] == {"low": None, "mean": None, "high": None, "not_finite": 1}
    assert [row["first"] for row in rows if row["skipped"]] == [50, 100]


def test_a_census_comes_back(make_run):
    run = make_run()
    for layer in read(run)["metrics"]["layers"]:
        assert Census.from_dict(layer["census"]) == run.total_layers()[layer["name"]]


@pytest.mark.parametrize(
    "changed",
    [
        {"findings": [], "steps": [], "layers": [], "manifest": {"facts": {}}},
        {"manifest": {"status": "running", "exit_code": None, "finished": None}},
        {"trouble": ["steps.jsonl is missing."]},
        {"facts": {"precision": "bf16"}},
        {"facts": {"precision": "fp32"}},
        {"manifest": {"status": "failed", "error": {"type": "E", "message": "m"}, "exit_code": 1}},
    ],
)
def test_other_endings_hold_too(make_run, changed):
    data = read(make_run(**changed))
    assert data["trouble"] == changed.get("trouble", [])


def test_the_environment_has_torch_and_ampwise(make_run):
    facts = {"torch": {"torch": "2.13.0+cu130", "cuda": "13.0", "devices": ["H200"], "threads": 2}}
    found = read(make_run(facts, {"ampwise": "0.1.0", "environment": {"python": "3.11"}}))["environment"]
    assert found == {"python": "3.11", **facts["torch"], "ampwise": "0.1.0"}


def test_a_layer_that_is_not_finite(make_run, make_sample):
    layers = {"nan": Census(nans=1), "inf": Census(infs=1)}
    found = {
        layer["name"]: layer["norm"] for layer in read(make_run(layers=[make_sample(1, layers)]))["metrics"]["layers"]
    }
    assert found == {"nan": "NaN", "inf": "Infinity"}


def test_a_long_run_is_thinned(make_run):
    steps = [StepBucket.of(StepRow(step=n, loss=float(n))) for n in range(1, 3 * MOST_ROWS)]
    rows = read(make_run(steps=steps))["metrics"]["steps"]
    assert len(rows) <= MOST_ROWS
    assert sum(row["count"] for row in rows) == len(steps)
    assert rows[-1]["loss"]["high"] == len(steps)


def test_hostile_names_stay_data(make_run, rules):
    name = "</script>\x1b[2J\u202e\udc80\"'"
    seen = CountedFinding(finding=rules["clip"].at(Place(file=name, line=1), name, evidence={name: {1, 2}}))
    data = read(make_run(findings=[seen], manifest={"script": name}))
    assert data["script"] == name.replace("\udc80", "\\udc80")
    assert data["findings"][0]["message"] == data["script"]
