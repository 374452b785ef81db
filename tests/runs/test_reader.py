"""Reading a record, whatever became of it."""

import json
import os
import platform
import re

import pytest
from hypothesis import HealthCheck, given, settings

from ampwise import BadInput, __version__
from ampwise.finding.registry import find_rule
from ampwise.runs.json_lines import read_bucket, step_line
from ampwise.runs.reader import Run
from ampwise.runs.rows import StepBucket
from ampwise.runs.writer import RecordWriter

from ..night import NIGHTLY
from .record_toys import RULE, change_manifest, row, runs_of_rows, sample, seen

anew = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@pytest.fixture
def record(tmp_path):
    writer = RecordWriter.create(tmp_path / "run", environment={"torch": "2.13"})
    for step in range(1, 6):
        writer.step(row(step))
        writer.layers(sample(step))
    writer.findings([seen(count=3, first_step=1, last_step=4, excerpt={"first_line": 2, "lines": ["a", "b"]})])
    writer.fact("gpu", "none")
    writer.close("finished", 0)
    return writer.folder


def test_a_record_comes_back(record):
    run = Run.read(record)
    assert (run.status, run.alive, run.trouble, run.ranks) == ("finished", False, [], {})
    assert run.steps == [read_bucket(step_line(row(step))) for step in range(1, 6)]
    assert run.layers == [sample(step) for step in range(1, 6)]
    assert (run.environment, run.facts, run.rank) == ({"torch": "2.13"}, {"gpu": "none"}, 0)
    assert run.findings == [seen(count=3, first_step=1, last_step=4, excerpt={"first_line": 2, "lines": ["a", "b"]})]
    assert run.total_layers()["bias"] == sum(sample(step).layers["bias"] for step in range(1, 6))
    assert run.total_layers(optimizer=1) == {}
    assert Run.read(str(record)) == run


@anew
@given(rows=runs_of_rows())
def test_rows_come_back_by_optimizer(tmp_path, rows):
    writer = RecordWriter.create(tmp_path / "run", force=True)
    for one in rows:
        writer.step(one)
    writer.close("finished", 0)
    run = Run.read(tmp_path / "run")
    assert run.steps == [read_bucket(step_line(one)) for one in rows]
    for optimizer in (0, 1):
        mine = [one.step for one in rows if one.optimizer == optimizer]
        assert [bucket.first for bucket in run.rows(optimizer)] == mine
    assert all(isinstance(bucket, StepBucket) for bucket in run.steps)


# --- torn and broken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "field"), [("steps.jsonl", "steps"), ("layers.jsonl", "layers")])
def test_torn_anywhere_it_gives_what_came_before_and_says_nothing(record, name, field):
    whole, data = getattr(Run.read(record), field), (record / name).read_bytes()
    seen_lengths = set()
    ends = {end.end() for end in re.finditer(b"\n", data)}
    for length in range(len(data)):
        if not (NIGHTLY or length % 11 == 0 or ends & {length - 1, length, length + 1}):
            continue
        (record / name).write_bytes(data[:length])
        run = Run.read(record)
        read = getattr(run, field)
        assert read == whole[: len(read)]
        assert run.trouble == []
        assert len(read) in {data[:length].count(b"\n"), data[: length + 1].count(b"\n")}  # nothing else is lost
        seen_lengths.add(len(read))
    assert seen_lengths == set(range(6))


def test_a_block_of_zeros_at_the_end_is_torn_too(record):
    with (record / "steps.jsonl").open("ab") as file:
        file.write(b"\0" * 512)
    run = Run.read(record)
    assert (len(run.steps), run.trouble) == (5, [])


def test_a_broken_line_in_the_middle_is_left_out_and_reported(record):
    lines = (record / "steps.jsonl").read_bytes().splitlines(keepends=True)
    lines[1:1] = [b"garbage\n"]
    lines[3:3] = [b'{"s":"x"}\n']
    (record / "steps.jsonl").write_bytes(b"".join(lines))
    run = Run.read(record)
    assert len(run.steps) == 5
    assert run.trouble == ["steps.jsonl: 2 of 7 lines cannot be read and were ignored; the first is line 2."]


@pytest.mark.parametrize("name", ["steps.jsonl", "layers.jsonl", "findings.json"])
def test_a_missing_file_is_reported(record, name):
    (record / name).unlink()
    assert Run.read(record).trouble == [f"{name} is missing."]


@pytest.mark.parametrize("name", ["steps.jsonl", "layers.jsonl", "findings.json"])
def test_a_link_or_a_pipe_in_the_place_of_a_file_is_reported_and_not_followed(record, name, tmp_path):
    outside = tmp_path / "outside"
    (record / name).rename(outside)
    (record / name).symlink_to(outside)
    assert Run.read(record).trouble == [f"{name} cannot be read: {name} is a link."]
    (record / name).unlink()
    os.mkfifo(record / name)
    assert Run.read(record).trouble == [f"{name} cannot be read: {name} is not a regular file."]


@pytest.mark.parametrize(
    "text", ["", "{", "3", "{}", '{"findings": 3, "rules": {}}', '{"findings": [], "rules": 3}', "[" * 100_000, "\xff"]
)
def test_findings_that_make_no_sense_are_reported(record, text):
    (record / "findings.json").write_text(text, encoding="latin-1")
    run = Run.read(record)
    assert run.findings == []
    assert len(run.trouble) == 1
    assert run.trouble[0].startswith("findings.json ")


@pytest.mark.parametrize(
    "change",
    [
        {"place": {"line": -3}},
        {"place": {"nonsense": 1}},
        {"message": 3},
        {"count": "many"},
        {"code": None},
        {"code": "AMP997"},
    ],
)
def test_a_finding_that_makes_no_sense_is_left_out_and_the_others_are_not(record, change):
    data = json.loads((record / "findings.json").read_text())
    data["findings"].append(data["findings"][0] | change)
    (record / "findings.json").write_text(json.dumps(data))
    run = Run.read(record)
    assert len(run.findings) == 1
    assert run.trouble == ["findings.json: 1 of 2 findings are invalid and were ignored."]


# --- rules ---------------------------------------------------------------------------------------------------------


def test_a_rule_that_nobody_has_is_read_from_the_record(record):
    (found,) = Run.read(record).findings
    assert found.finding.rule == RULE


def test_a_rule_of_ours_is_ours_whatever_the_record_says(tmp_path):
    ours = find_rule("AMP101")
    writer = RecordWriter.create(tmp_path / "run")
    writer.findings([seen(rule=ours)])
    writer.close("finished", 0)
    path = writer.folder / "findings.json"
    path.write_text(path.read_text().replace(json.dumps(ours.why), '"An older reason."'))
    assert Run.read(writer.folder).findings[0].finding.rule == ours


def test_a_code_that_belongs_to_another_rule_by_now_keeps_the_stored_one(tmp_path):
    taken = RULE.but(code="AMP101")
    writer = RecordWriter.create(tmp_path / "run")
    writer.findings([seen(rule=taken)])
    writer.close("finished", 0)
    assert Run.read(writer.folder).findings[0].finding.rule == taken


# --- the manifest --------------------------------------------------------------------------------------------------


def test_a_newer_version_says_which_ampwise_reads_it(record):
    change_manifest(record, version=2, ampwise="3.4")
    with pytest.raises(BadInput) as refused:
        Run.read(record)
    assert str(refused.value) == (
        f"{record} is a record of version 2, written by ampwise 3.4; this is ampwise {__version__}, "
        "which reads up to version 1. Read it with ampwise 3.4 or later."
    )


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None, [1]])
def test_a_version_that_there_never_was(record, version):
    change_manifest(record, version=version)
    with pytest.raises(BadInput, match=r"known versions: 1\."):
        Run.read(record)


def test_what_is_no_record_says_how_to_get_one(tmp_path):
    with pytest.raises(
        BadInput, match=r"nowhere does not exist\. `ampwise run -o .*nowhere train.py` writes a record\."
    ):
        Run.read(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"is not a record: it has no manifest\.json\. `ampwise run -o RUN train.py`"):
        Run.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file is a file, and a record is a folder\.$"):  # and no way to make one there
        Run.read(tmp_path / "file")
    (tmp_path / "manifest.json").write_text('{"format": "web app"}')
    with pytest.raises(BadInput, match=r"is not an ampwise record: expected the format 'ampwise-run'\."):
        Run.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is truncated or damaged"),
        ("{", "it is truncated or damaged"),
        ("[" * 100_000, "it is nested too deeply"),
        ("\xff", "it is truncated or damaged"),
    ],
)
def test_a_manifest_that_cannot_be_read_leaves_the_rest(record, text, why):
    whole = Run.read(record)
    (record / "manifest.json").write_text(text, encoding="latin-1")
    run = Run.read(record)
    assert (run.steps, run.layers, run.findings) == (whole.steps, whole.layers, whole.findings)
    assert (run.manifest, run.status, run.findings_known) == ({}, "unknown", True)
    assert run.trouble == [f"manifest.json, which has the command and how the run ended, cannot be read: {why}."]
    for name in ("steps.jsonl", "layers.jsonl", "findings.json"):
        (record / name).unlink()
    with pytest.raises(BadInput) as refused:  # there is nothing to show, and perhaps it never was a record
        Run.read(record)
    assert str(refused.value) == (f"{record}: {run.trouble[0]} The other files are empty, too. Name another record.")


def test_a_manifest_of_a_gigabyte_is_not_taken_in(record):
    with (record / "manifest.json").open("r+b") as file:
        file.truncate(10**9)
    assert "cannot be read: it has more than 4,000,000 bytes." in Run.read(record).trouble[0]


def test_a_link_that_leads_nowhere(tmp_path):
    for name in ("loop", "gone"):
        (tmp_path / name).symlink_to(tmp_path / ("loop" if name == "loop" else "nothing"))
        with pytest.raises(BadInput, match=rf"{name} is a broken link\.$"):
            Run.read(tmp_path / name)


def test_what_an_error_quotes_of_a_record_cannot_harm_a_terminal(record):
    change_manifest(record, version=2, ampwise="3\x1b[2J\n")
    with pytest.raises(BadInput, match=r"written by ampwise 3\\x1b\[2J\\n; this"):
        Run.read(record)


@pytest.mark.parametrize("text", [None, "", "{}", '{"findings": [{}], "rules": {}}'])
def test_findings_that_could_not_all_be_read_are_not_known(record, text):
    assert Run.read(record).findings_known
    (record / "findings.json").unlink()
    if text is not None:
        (record / "findings.json").write_text(text)
    assert not Run.read(record).findings_known
    assert "Expecting" not in " ".join(Run.read(record).trouble)  # the words of a JSON reader


@pytest.mark.parametrize("broken", ["findings.json", "manifest.json", None])
def test_those_of_every_rank_have_to_be_known(tmp_path, broken):
    for rank in range(2):
        RecordWriter.create(tmp_path / "run", rank=rank, world_size=2).close("finished", 0)
    assert Run.read(tmp_path / "run").findings_known
    if broken:
        (tmp_path / "run" / "rank1" / broken).unlink()
    assert Run.read(tmp_path / "run").findings_known is (broken is None)


def test_steps_of_terabytes_are_not_taken_in(record):
    with (record / "steps.jsonl").open("r+b") as file:
        file.truncate(10**12)
    assert Run.read(record).trouble == ["steps.jsonl cannot be read: it has more than 100,000,000 bytes."]


def test_a_manifest_of_odd_parts_can_still_be_asked(record):
    change_manifest(record, environment=[1], facts=3, rank="first", trouble={"a": 1}, pid="x", status="running")
    run = Run.read(record)
    assert (run.environment, run.facts, run.rank, run.alive) == ({}, {}, 0, None)
    assert run.trouble == ["manifest.json: invalid values were ignored: rank, pid, trouble, environment, facts."]


@pytest.mark.parametrize(
    ("pid", "host", "alive"),
    [
        (os.getpid(), platform.node(), True),
        (1, platform.node(), True),
        (os.getpid(), "elsewhere", None),
        (os.getpid(), "", None),
        (2**22 + 5, platform.node(), False),  # above the largest that Linux gives
        (2**62, platform.node(), False),
        (0, platform.node(), None),
        (-1, platform.node(), None),
        (True, platform.node(), None),
        (None, None, None),
    ],
    ids=["this", "first", "elsewhere", "nowhere", "beyond", "far beyond", "zero", "negative", "true", "none"],
)
def test_whether_it_still_runs(record, pid, host, alive):
    change_manifest(record, status="running", pid=pid, host=host)
    run = Run.read(record)
    assert (run.status, run.alive) == ("running or killed", alive)


def test_a_run_can_be_read_at_any_moment(tmp_path):
    writer = RecordWriter.create(tmp_path / "run")
    for step in range(1, 30):
        writer.step(row(step))
        writer.fact("step", step)
        run = Run.read(tmp_path / "run")
        assert run.trouble == []
        assert [bucket.first for bucket in run.steps] == list(range(1, len(run.steps) + 1))
    writer.close("finished", 0)
