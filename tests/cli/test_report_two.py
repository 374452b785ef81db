"""`ampwise report A B`: two records that were really written, compared."""

import json
import webbrowser

import pytest

from ampwise.cli import main
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.report.page import GENERATOR_MARK
from ampwise.runs.rows import CountedFinding, StepRow
from ampwise.runs.writer import RecordWriter


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def write_record(folder, *lines, level=2.0, steps=40):
    writer = RecordWriter.create(folder, command=["train.py"], script="train.py", environment={"torch": "2.13.0"})
    for step in range(1, steps + 1):
        writer.step(StepRow(step=step, loss=level + step % 2 / 100, scale=65536.0, norm=0.5))
    places = [Place(file="train.py", line=line) for line in lines]
    writer.findings([CountedFinding(finding=find_rule("AMP101").at(place, "clipped while scaled")) for place in places])
    writer.fact("precision", "fp16")
    writer.close("finished", 0)
    return folder


@pytest.fixture
def two(tmp_path):
    return write_record(tmp_path / "a", 2, 90), write_record(tmp_path / "b", 5, level=1.5)


def report(*words):
    return main(["report", *map(str, words)])


def test_the_text(two, capsys):
    assert report(*two) == 0
    text = capsys.readouterr().out
    assert f"{two[1]} has 1 finding where {two[0]} had 2: 1 gone, none new; loss" in text.replace("\n", " ")
    assert ["loss", "at", "the", "end", "2.005", "1.505", "−25%,", "better"] in [
        line.split() for line in text.splitlines()
    ]
    assert "train.py:90" in text[text.index("Gone (1)") :]
    assert "\x1b" not in text


def test_json(two, capsys):
    assert report(*two, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["before"], data["after"], data["shared_steps"]) == (str(two[0]), str(two[1]), 40)
    assert [one["before"]["place"]["line"] for one in data["gone"]] == [90]
    assert next(one["judged"] for one in data["numbers"] if one["key"] == "loss_at_end") == "better"


def test_the_page(two, tmp_path, capsys):
    paper = tmp_path / "two.html"
    for _ in range(2):  # an earlier page gives way to the next
        assert report(*two, "-o", paper) == 0
    assert GENERATOR_MARK in paper.read_text()
    assert capsys.readouterr().out.endswith(f"Wrote {paper}\n")


def test_open_puts_the_page_into_the_later_record(two, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or True)
    assert report(*two, "--open") == 0
    assert shown == [(two[1] / "comparison.html").as_uri()]
    assert not list(two[0].glob("*.html"))
    assert report(two[1]) == 0  # and is no trouble to it
    assert "Trouble" not in capsys.readouterr().out


def test_a_record_beside_itself(two, capsys):
    assert report(two[0], two[0]) == 0
    assert "is compared with itself; it has 2 findings" in capsys.readouterr().out.replace("\n", " ")


def test_three_are_too_many(two, capsys):
    assert report(*two, two[0]) == 2
    assert capsys.readouterr().err == (
        "ampwise: error: report: expected one record, or two to compare, got 3. Compare two at a time.\n"
    )


@pytest.mark.parametrize("which", [0, 1])
def test_the_one_that_cannot_be_read_is_named(two, capsys, which):
    (two[which] / "manifest.json").unlink()
    assert report(*two) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ampwise: error: {two[which]} is not a record")
    assert error.endswith(f"`ampwise report {two[1 - which]}` shows the other one.\n")


def test_what_is_left_of_a_torn_record_is_compared(two, capsys):
    (two[0] / "findings.json").unlink()
    steps = two[1] / "steps.jsonl"
    steps.write_bytes(b"nonsense\n" + steps.read_bytes()[:-5])
    assert report(*two) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{two[0]}: findings.json is missing." in text
    assert f"{two[1]}: steps.jsonl: 1 of 41 lines cannot be read" in text
    assert "loss after 39 steps" in text


def test_a_run_that_is_still_going(two, tmp_path, capsys):
    writer = RecordWriter.create(tmp_path / "c", script="train.py")
    writer.step(StepRow(step=1, loss=2.0))
    writer.flush()
    assert report(two[0], tmp_path / "c") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"{tmp_path / 'c'} is still going after 1 step; ")
    assert "too few steps to tell" in text
    writer.close("finished", 0)
