"""A report on many ranks: the layers of all but the first are shown nowhere, and read for nothing."""

from pathlib import Path

import pytest

from ampwise.cli import main
from ampwise.finding import Place
from ampwise.finding.registry import find_rule
from ampwise.numbers.census.algebra import Census
from ampwise.runs import reader
from ampwise.runs.reader import RecordFollower, Run
from ampwise.runs.rows import CountedFinding, LayerSample, StepRow
from ampwise.runs.writer import RecordWriter
from ampwise.watch.findings import add_findings_of_ranks

RANKS = 3


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def write_ranks(folder, level):
    """Each rank has its own steps, scales and findings, and layers that no other has."""
    for rank in range(RANKS):
        writer = RecordWriter.create(folder, rank=rank, world_size=RANKS, script="train.py", command=["train.py"])
        for step in range(1, 9):
            writer.step(StepRow(step=step, loss=level / step, scale=2.0 ** (16 - rank), norm=0.5, skipped=step == rank))
        binade = rank - round(10 * level)
        counted = Census(binades={binade: 3}, zeros=rank, amax=2 ** (binade + 0.5), amin=2 ** (binade + 0.5))
        layers = {"head.weight": counted, f"only.on.rank{rank}": counted}
        writer.layers(LayerSample(first=1, last=1, scale=65536.0, layers=layers))
        finding = find_rule("AMP101").at(Place(file="train.py", line=2 + rank), "clipped while scaled")
        writer.findings([CountedFinding(finding=finding, count=1 + rank, first_step=1, last_step=8)])
        writer.close("finished", 0)
    add_findings_of_ranks(folder)
    return str(folder)


@pytest.fixture
def two(tmp_path):
    return [write_ranks(tmp_path / name, level) for name, level in (("before", 2.0), ("after", 1.0))]


@pytest.fixture
def with_all(monkeypatch):
    """From when it is called, all layers are read."""

    def read_all():
        monkeypatch.setattr(Run, "read", classmethod(lambda _, folder, read=Run.read, **__: read(folder)))
        monkeypatch.setattr(reader, "RecordFollower", lambda folder, **_: RecordFollower(folder, layers_of_others=True))

    return read_all


def told(words, capsys, paper):
    """What the command prints, and what it draws."""
    assert main([*words, *(["-f", "-o", str(paper)] if paper else [])]) == 0
    return capsys.readouterr().out, paper.read_text() if paper else ""


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "two compared"])
@pytest.mark.parametrize("form", ["text", "--json", "page"])
def test_a_report_is_the_same_with_and_without_them(two, tmp_path, capsys, with_all, form, count):
    words = ["report", "-v", *two[:count], *(["--json"] if form == "--json" else [])]
    paper = tmp_path / "page.html" if form == "page" else None
    without = told(words, capsys, paper)
    with_all()
    assert told(words, capsys, paper) == without
    shown = "".join(without)
    assert "head.weight" in shown or "Layers: all " in shown or count == 2  # the first rank's
    assert "only.on.rank1" not in shown


@pytest.mark.parametrize("words", [["--once"], []], ids=["once", "to the end"])
def test_a_live_view_is_the_same_with_and_without_them(two, capsys, with_all, words, monkeypatch):
    monkeypatch.setattr("ampwise.report.live.terminal.LATE_S", 0.0)  # nothing is added to it any more
    without = told(["watch", two[0], *words], capsys, None)
    with_all()
    assert told(["watch", two[0], *words], capsys, None) == without
    assert "findings 4" in without[0]  # those of all ranks


def test_what_is_not_asked_for_is_not_opened(two, capsys, monkeypatch):
    parsed = []
    monkeypatch.setattr(reader, "read_layers", lambda line, read=reader.read_layers: parsed.append(line) or read(line))
    for words in (["report", two[0]], ["watch", two[0], "--once"]):
        assert main(words) == 0
    add_findings_of_ranks(Path(two[0]))
    capsys.readouterr()
    assert len(parsed) == 3, "the first rank's sample, by each of them"
    Run.read(two[0])
    assert len(parsed) == 3 + RANKS, "all of them, for who does not say otherwise"


def test_ranks_are_judged_together_as_with_them(two):
    full, without = (Run.read(two[0], layers_of_others=wanted) for wanted in (True, False))
    assert [part.layers for part in without.ranks.values()] == [[]] * (RANKS - 1)
    assert all(part.layers for part in full.ranks.values())
    assert without.layers == full.layers != []
    assert without.merged_findings() == full.merged_findings()
    assert without.scales_by_rank() == full.scales_by_rank()
    assert "AMP" in {seen.finding.rule.code[:3] for seen in without.findings}
    assert len(without.findings) == 2, "that their scales are not the same is the first rank's, too"
