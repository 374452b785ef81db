"""Several ranks, each with its part of a record."""

import pytest

from ampwise import BadInput
from ampwise.runs.layout import prepare_folder
from ampwise.runs.reader import Run
from ampwise.runs.rows import StepRow
from ampwise.runs.writer import RecordLimits, RecordWriter

from .record_toys import RULE, WORSE, manifest_of, row, sample, seen


@pytest.fixture
def start(tmp_path):
    """Start the ranks in any order; ``end`` them."""

    def start(*ranks, world_size=None, **arguments):
        size = world_size or len(ranks)
        return {rank: RecordWriter.create(tmp_path / "run", rank=rank, world_size=size, **arguments) for rank in ranks}

    return start


def end(writers):
    for writer in writers.values():
        writer.close("finished", 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("force", [False, True])
def test_ranks_may_start_in_any_order(start, tmp_path, order, force):
    writers = start(*order, force=force)
    for rank, writer in writers.items():
        writer.step(row(1, loss=float(rank)))
    end(writers)
    run = Run.read(tmp_path / "run")
    assert (run.trouble, run.rank, sorted(run.ranks)) == ([], 0, [1, 2])
    assert [part.steps[0].loss.mean for part in (run, run.ranks[1], run.ranks[2])] == [0.0, 1.0, 2.0]
    assert manifest_of(tmp_path / "run" / "rank2")["rank"] == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("before", [(0,), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_a_second_run_of_ranks_over_the_first_with_force(start, tmp_path, before, order):
    first = start(*before)
    for writer in first.values():
        writer.step(row(1, loss=100.0))
    end(first)
    second = start(*order, force=True)
    for writer in second.values():
        writer.step(row(1, loss=1.0))
    end(second)
    run = Run.read(tmp_path / "run")
    assert sorted(run.ranks) == [1, 2]
    assert [part.steps[0].loss.mean for part in (run, *run.ranks.values())] == [1.0, 1.0, 1.0]


def test_a_record_never_looks_like_something_else_to_other_ranks_while_it_is_written_over(tmp_path):
    """Its manifest is the last to go, and goes by being replaced."""
    RecordWriter.create(tmp_path, world_size=2).close("finished", 0)
    prepare_folder(tmp_path, world_size=2, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("before", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
def test_without_force_each_rank_refuses_and_leaves_no_trace(start, tmp_path, before, rank):
    end(start(*before))
    names = {str(path) for path in tmp_path.rglob("*")}
    with pytest.raises(BadInput, match=r"already holds a record; -f overwrites it, -o names another folder\."):
        start(rank, world_size=3)
    assert {str(path) for path in tmp_path.rglob("*")} == names


def test_parts_of_ranks_that_lost_their_first_are_not_thrown_away(start, tmp_path):
    end(start(1, 2, world_size=3))
    with pytest.raises(BadInput, match="holds a record"):
        start(0)
    assert (tmp_path / "run" / "rank2" / "manifest.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("force", [False, True])
def test_no_rank_goes_into_a_folder_of_something_else(start, tmp_path, rank, force):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="not an ampwise record"):
        start(rank, world_size=2, force=force)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_linked_rank_is_neither_written_nor_read_nor_removed(start, tmp_path):
    outside = tmp_path / "outside"
    end(start(0, 1))
    (tmp_path / "run" / "rank1").rename(outside)
    (tmp_path / "run" / "rank1").symlink_to(outside)
    run = Run.read(tmp_path / "run")
    assert (run.ranks, run.trouble) == ({}, ["rank1 is a link and was not followed."])
    with pytest.raises(BadInput, match=r"rank1 is a link, and records are not written through links\. Remove it"):
        start(1, world_size=2, force=True)
    end(start(0, force=True))
    assert (outside / "manifest.json").exists()


def test_a_rank_that_cannot_be_read_is_reported(start, tmp_path):
    end(start(0, 1, 2))
    (tmp_path / "run" / "rank1" / "manifest.json").unlink()
    (tmp_path / "run" / "rank2" / "steps.jsonl").unlink()
    run = Run.read(tmp_path / "run")
    assert sorted(run.ranks) == [2]
    assert "rank1 is not a record" in run.trouble[0]
    assert run.trouble[1:] == ["rank2: steps.jsonl is missing."]


def test_names_that_are_no_ranks_are_let_be(start, tmp_path):
    end(start(0))
    for name in ("rank", "rank0", "rank01", "rankx", "rank-1", "rank²", "xrank1", "rank1e3", "rank99999999999"):
        (tmp_path / "run" / name).mkdir()
    run = Run.read(tmp_path / "run")
    assert (run.ranks, run.trouble) == ({}, [])


# --- merging -------------------------------------------------------------------------------------------------------


def test_the_same_finding_of_several_ranks_is_one(start, tmp_path):
    writers = start(0, 1, 2)
    for rank, writer in writers.items():
        steps = {"first_step": None if rank == 0 else 10 - rank, "last_step": 20 + rank}
        excerpt = {"first_line": 2, "lines": ["x"]} if rank == 1 else {}
        writer.findings([seen("all", rank=rank, count=rank + 1, excerpt=excerpt, **steps)])
    end(writers)
    (found,) = Run.read(tmp_path / "run").merged_findings()
    assert (found.count, found.ranks, found.first_step, found.last_step) == (6, [0, 1, 2], 8, 22)
    assert found.excerpt == {"first_line": 2, "lines": ["x"]}
    assert found.finding.place.rank is None
    assert str(found.finding.place) == "train.py:3"


def test_the_worst_come_first_and_then_the_most_frequent(start, tmp_path):
    writers = start(0, 1)
    writers[0].findings([seen("rare"), seen("often", count=50), seen("elsewhere", line=9, count=2)])
    writers[1].findings([seen("bad", rule=WORSE, rank=1), seen("rare", line=4), seen("elsewhere", line=9, count=2)])
    end(writers)
    run = Run.read(tmp_path / "run")
    told = [(one.finding.rule.code, one.finding.message, one.count, one.ranks) for one in run.merged_findings()]
    assert told == [
        ("AMP999", "bad", 1, [1]),
        ("AMP998", "often", 50, [0]),
        ("AMP998", "elsewhere", 4, [0, 1]),
        ("AMP998", "rare", 1, [0]),
        ("AMP998", "rare", 1, [1]),
    ]
    assert [one.ranks for one in run.findings] == [[], [], []]  # the record's own are left as they were
    assert run.findings[0].finding.rule == RULE


def test_the_scales_of_each_rank(start, tmp_path):
    writers = start(0, 1)
    for step in range(1, 5):
        writers[0].step(StepRow(step=step, scale=65536.0))
        writers[1].step(StepRow(step=step, scale=65536.0 if step < 3 else 2.0**25))
        writers[1].step(StepRow(step=step, optimizer=1, scale=8.0))
    writers[0].step(StepRow(step=5))
    end(writers)
    run = Run.read(tmp_path / "run")
    assert run.scales_by_rank() == {
        0: dict.fromkeys(range(1, 5), 65536.0),
        1: {1: 65536.0, 2: 65536.0, 3: 2.0**25, 4: 2.0**25},
    }
    assert run.scales_by_rank(optimizer=1) == {0: {}, 1: dict.fromkeys(range(1, 5), 8.0)}


def test_scales_of_merged_steps_are_known_where_they_did_not_change(start, tmp_path):
    writers = start(0, limits=RecordLimits(rows=8, buffer_bytes=1))
    for step in range(1, 40):
        writers[0].step(StepRow(step=step, scale=1024.0 if step < 6 else 512.0))
    end(writers)
    scales = Run.read(tmp_path / "run").scales_by_rank()[0]
    assert {step: scale for step, scale in scales.items() if scale != (1024.0 if step < 6 else 512.0)} == {}
    assert 39 in scales


def test_layers_of_a_rank(start, tmp_path):
    writers = start(0, 1)
    writers[1].layers(sample(3))
    end(writers)
    run = Run.read(tmp_path / "run")
    assert run.total_layers() == {}
    assert run.ranks[1].total_layers() == dict(sample(3).layers)


# --- at the same moment --------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(tmp_path, ranks_keep_coming):
    ranks_keep_coming(tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("force", [False, True])
def test_ranks_that_come_while_one_makes_room_are_no_strangers(tmp_path, crowd, rank, force):
    (tmp_path / "run").mkdir()
    own = prepare_folder(tmp_path / "run", rank=rank, world_size=100, force=force)
    assert own == (tmp_path / "run" / "rank1" if rank else tmp_path / "run")


def test_something_else_is_refused_also_in_a_crowd(tmp_path, crowd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rankings.csv").write_text("years of work")
    for rank in (0, 1):
        with pytest.raises(BadInput, match="not an ampwise record"):
            prepare_folder(tmp_path / "run", rank=rank, world_size=100, force=True)
