"""Which record is meant, and what a folder is that is none."""

import json

import pytest

from ampwise.runs.layout import newest_record, records_in, why_not_a_record
from ampwise.runs.writer import RecordWriter

from .record_toys import change_manifest


@pytest.fixture
def three(tmp_path):
    """Records whose age by name, by the file system and by what they say are all different."""
    for name, created in [("a", "2026-03-01"), ("b", "2026-01-01"), ("c", "2026-02-01")]:
        RecordWriter.create(tmp_path / name).close("finished", 0)
        change_manifest(tmp_path / name, created=f"{created}T00:00:00+00:00")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_the_newest_is_the_one_that_began_last(three):
    assert [folder.name for folder in records_in(three)] == ["a", "c", "b"]
    assert newest_record(three) == three / "a"
    assert why_not_a_record(three) == f"It contains 3 records: `ampwise report {three / 'a'}` shows the newest."


def test_one_that_does_not_say_when_is_the_oldest(three):
    change_manifest(three / "a", created=None)
    assert newest_record(three) == three / "c"


def test_a_folder_without_records(tmp_path):
    assert newest_record(tmp_path) is None
    assert newest_record(tmp_path / "nowhere") is None
    assert why_not_a_record(tmp_path) == why_not_a_record(tmp_path / "nowhere") == ""


def test_of_a_record_there_is_nothing_to_say(three):
    assert why_not_a_record(three / "a") == ""
    assert why_not_a_record(three / "a" / "steps.jsonl") == f"The record is its folder, {three / 'a'}."


def test_a_link_to_itself_has_a_name(tmp_path):
    (tmp_path / "mlruns").symlink_to(tmp_path / "mlruns")
    assert why_not_a_record(tmp_path / "mlruns").startswith("It looks like an MLflow log")


def test_a_folder_is_known_by_its_name_from_within(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path / "wandb")
    from pathlib import Path

    assert why_not_a_record(Path()).startswith("It looks like a Weights & Biases log")


def test_another_programs_manifest_is_no_record(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text(json.dumps({"name": "a web page"}))
    assert records_in(tmp_path) == []
