"""Which record is meant, while ranks are about to make it."""

import pytest

from ampwise.report.live.poller import find_record
from ampwise.runs.writer import RecordWriter


@pytest.fixture
def folder(tmp_path, ranks_keep_coming):
    (tmp_path / "run").mkdir()
    ranks_keep_coming(tmp_path / "run")
    return tmp_path / "run"


def test_a_record_may_yet_come_to_where_ranks_gather(folder):
    (folder / "manifest.json.new").touch()
    assert [find_record(folder) for _ in range(3)] == [None] * 3


def test_it_is_found_when_the_first_has_come(folder):
    RecordWriter.create(folder, world_size=100).close("finished", 0)
    assert find_record(folder) == folder


@pytest.mark.parametrize("name", ["thesis.tex", "rank0", "rank01", "rankings.csv", "rank123456789"])
def test_where_something_else_is_none_is_waited_for(folder, name):
    (folder / name).touch()
    assert find_record(folder) == folder
