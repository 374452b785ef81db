"""Events in a record: kept in order, as far as they fit, and gone with the record."""

import pytest

from ampwise.runs import writer as writing
from ampwise.runs.events import LoggedEvent
from ampwise.runs.reader import RecordFollower, Run
from ampwise.runs.writer import RecordWriter

from .record_toys import row


def event(step=1):
    return LoggedEvent(name="rolled-back", level="warning", message="rolled back", step=step, fields={"to_step": 0})


@pytest.fixture
def record(tmp_path):
    return RecordWriter.create(tmp_path / "run")


def test_the_file_is_there_once_there_is_an_event(record):
    record.step(row(1))
    assert not (record.folder / "events.jsonl").exists()
    for step in (1, 2):
        record.event(event(step))
        assert Run.read(record.folder).events[-1] == event(step)  # at once: it may be the last that the process does
    record.close("finished", 0)
    record.event(event(3))
    run = Run.read(record.folder)
    assert (run.events, run.trouble) == ([event(1), event(2)], [])


def test_a_follower_sees_them_come(record):
    record.step(row(1))
    follower = RecordFollower(record.folder)
    assert follower.look().events == []
    record.event(event())
    assert follower.look().events == [event()]
    record.close("finished", 0)


def test_a_new_record_has_none_of_the_old_ones(record):
    record.event(event())
    record.close("finished", 0)
    RecordWriter.create(record.folder, force=True).close("finished", 0)
    assert Run.read(record.folder).events == []


def test_too_many_are_left_out_and_the_record_says_so(record, monkeypatch):
    monkeypatch.setattr(writing, "MOST_EVENTS", 3)
    for step in range(5):
        record.event(event(step))
    record.close("finished", 0)
    run = Run.read(record.folder)
    assert len(run.events) == 3
    (said,) = run.trouble
    assert said.startswith("events.jsonl: ")
    assert "more than 3 events" in said


def test_a_link_in_its_place_is_not_followed(record, tmp_path):
    (tmp_path / "elsewhere").write_text("mine\n")
    (record.folder / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    record.event(event())
    record.close("finished", 0)
    assert (tmp_path / "elsewhere").read_text() == "mine\n"
    assert any("events.jsonl" in said for said in Run.read(record.folder).trouble)
