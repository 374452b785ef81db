"""A record as it grows: never in the way of the training, and never too large."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import pytest

from ampwise import BadInput
from ampwise.numbers.census.algebra import Census
from ampwise.runs import files, json_lines
from ampwise.runs.reader import Run
from ampwise.runs.rows import LayerSample, merge_buckets
from ampwise.runs.writer import RecordLimits, RecordWriter

from ..night import NIGHTLY, by_night
from .record_toys import manifest_of, row, sample, seen

SMALL = RecordLimits(rows=400, samples=16, buffer_bytes=2000)
FULL = Path("/dev/full")


@pytest.fixture
def make(tmp_path):
    writers = []

    def make(name="run", **arguments):
        writers.append(RecordWriter.create(tmp_path / name, **arguments))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close("finished", 0)


# --- the manifest --------------------------------------------------------------------------------------------------


def test_a_record_from_its_first_moment_on(make):
    writer = make(
        command=["ampwise", "run", "train.py"], script="train.py", environment={"torch": "2.13", "gpus": (1,)}
    )
    manifest = manifest_of(writer.folder)
    assert (manifest["format"], manifest["version"], manifest["status"]) == ("ampwise-run", 1, "running")
    assert (manifest["command"], manifest["script"]) == (["ampwise", "run", "train.py"], "train.py")
    assert manifest["environment"] == {"torch": "2.13", "gpus": [1]}
    assert (manifest["rank"], manifest["world_size"], manifest["pid"]) == (0, 1, os.getpid())
    assert (manifest["exit_code"], manifest["error"], manifest["finished"]) == (None, None, None)
    assert {path.name for path in writer.folder.iterdir()} == {
        "manifest.json",
        "steps.jsonl",
        "layers.jsonl",
        "findings.json",
    }
    assert Run.read(writer.folder).trouble == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, None),
        (ValueError("it broke"), {"type": "ValueError", "message": "it broke"}),
        ({"type": "ValueError", "message": "it broke"}, {"type": "ValueError", "message": "it broke"}),
    ],
)
def test_how_it_ended(make, error, told):
    writer = make()
    writer.close("failed", 1, error)
    manifest = manifest_of(writer.folder)
    assert (manifest["status"], manifest["exit_code"], manifest["error"]) == ("failed", 1, told)
    assert manifest["finished"] >= manifest["created"]


def test_the_first_end_holds_and_nothing_comes_after_it(make):
    writer = make()
    writer.close("interrupted", 130)
    writer.close("finished", 0)
    writer.step(row(1))
    writer.layers(sample(1))
    writer.findings([seen()])
    writer.fact("late", 1)
    writer.flush()
    run = Run.read(writer.folder)
    assert (run.status, run.steps, run.layers, run.findings, dict(run.facts)) == ("interrupted", [], [], [], {})
    assert writer.trouble == []


def test_an_end_that_there_is_not_is_refused(make):
    text = r"close\('done'\): expected one of running, finished, failed, interrupted\."
    with pytest.raises(BadInput, match=text):
        make().close("done", 0)


def test_an_exception_that_cannot_be_printed_is_still_an_end(make):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    writer = make()
    writer.close("failed", 1, Odd())
    assert manifest_of(writer.folder)["error"] == {"type": "Odd", "message": "(no message: str() failed)"}


def test_facts_get_to_the_manifest(make):
    writer = make()
    writer.fact("first", 1)
    for number in range(50):
        writer.fact("second", number)
    writer.fact("odd", {"norm": float("nan"), "path": Path("x")})
    writer.flush()
    assert manifest_of(writer.folder)["facts"] == {"first": 1, "second": 49, "odd": {"norm": "NaN", "path": "x"}}


def test_facts_cost_one_write_a_second(make, monkeypatch):
    writer = make()
    written = []
    monkeypatch.setattr("ampwise.runs.writer.write_atomically", lambda path, pieces: written.append(path.name))
    for number in range(1000):
        writer.fact("count", number)
    assert len(written) < 100  # one, on a machine that is not asleep
    monkeypatch.undo()


# --- no older record is lost ---------------------------------------------------------------------------------------


def test_an_older_record_is_not_written_over_unless_reported_to(make, tmp_path):
    older = make()
    older.step(row(1))
    older.close("finished", 0)
    with pytest.raises(BadInput) as refused:
        make()
    assert (
        str(refused.value) == f"{tmp_path / 'run'} already holds a record; -f overwrites it, -o names another folder."
    )
    assert len(Run.read(older.folder).steps) == 1
    make(force=True)
    assert Run.read(older.folder).steps == []


def test_force_removes_what_is_of_a_record_and_nothing_else(make, tmp_path):
    for rank in range(4):
        make(rank=rank, world_size=4).close("finished", 0)
    folder = tmp_path / "run"
    (folder / "notes.txt").write_text("mine")
    (folder / "rank3" / "notes.txt").write_text("mine")
    (folder / "rank7").mkdir()
    (folder / "rank7" / "notes.txt").write_text("mine")
    (folder / "steps.jsonl.new").write_text("left by a kill")
    make(force=True, world_size=2)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    ours = {"manifest.json", "steps.jsonl", "layers.jsonl", "findings.json"}
    # That of rank 1 is the business of rank 1, which may be at work in it already.
    assert left == ours | {f"rank1/{name}" for name in ours} | {"notes.txt", "rank3/notes.txt", "rank7/notes.txt"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("manifest", [None, "{}", "[]", "not json", '{"format": "of another program"}'])
def test_a_folder_of_something_else_is_refused_even_with_force(make, tmp_path, force, manifest):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(BadInput) as refused:
        make(force=force)
    assert str(refused.value) == (
        f"{folder} is not empty and not an ampwise record, so it is not overwritten; -o names another folder."
    )
    assert before == {path: path.read_text() for path in folder.iterdir()}


def test_an_empty_folder_and_one_that_a_kill_left_without_manifest_are_taken(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json.new").write_text('{"form')
    make()
    assert Run.read(tmp_path / "run").trouble == []


def test_a_file_is_no_folder(make, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BadInput, match=r"run is a file, and a record is a folder; -o names another\."):
        make(force=True)


def test_a_folder_that_cannot_be_made_is_an_error_before_the_training(make, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BadInput, match=r"cannot write a record to .*run: Permission denied\. -o names another"):
        make()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where nobody can make a folder")
def test_a_place_that_takes_no_folders():
    with pytest.raises(BadInput, match=r"cannot write a record to /proc/run: .*\. -o names another folder\."):
        RecordWriter.create("/proc/run")


# --- trouble while it runs -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_is_said_once_and_the_rest_goes_on(make):
    writer = make()
    writer.step(row(1))
    writer._steps._file.close()
    writer._steps._file = FULL.open("wb", buffering=0)
    for step in range(2, 2000):
        writer.step(row(step))
    writer.layers(sample(5))
    writer.findings([seen()])
    writer.flush()
    said = "steps.jsonl could not be written: No space left on device. Later data is missing from the record."
    assert writer.trouble == [said]
    assert writer._steps._buffered == []  # and memory does not fill up
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert (len(run.steps), len(run.layers), len(run.findings), run.status) == (1, 1, 1, "finished")
    assert run.trouble == [said]


def test_a_disk_that_is_full_in_the_middle_of_thinning(make, monkeypatch):
    writer = make(limits=SMALL)
    for step in range(1, 100):
        writer.step(row(step))
    writer.flush()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    for step in range(100, 1000):
        writer.step(row(step))
    writer.findings([seen()])
    monkeypatch.undo()
    assert [said.split(" could")[0] for said in writer.trouble] == ["steps.jsonl", "findings.json"]
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert len(run.steps) >= 400  # what was there before stays
    assert run.findings == []
    assert not list(writer.folder.glob("*.new"))


def test_a_folder_that_goes_away(make):
    writer = make(limits=SMALL)
    for path in writer.folder.iterdir():
        path.unlink()
    writer.folder.rmdir()
    for step in range(1, 1000):
        writer.step(row(step))
        writer.layers(sample(step))
    writer.findings([seen()])
    writer.fact("a", 1)
    writer.close("finished", 0)
    assert {said.split(" could")[0] for said in writer.trouble} == {
        "steps.jsonl",
        "layers.jsonl",
        "findings.json",
        "manifest.json",
    }


def test_a_row_that_makes_no_sense_is_left_out_and_the_next_is_not(make):
    writer = make()
    writer.step(row(1, loss="high"))
    writer.step(None)
    writer.step(row(2))
    writer.layers(None)
    writer.findings([None])
    writer.close("finished", 0)
    assert [said.split(":")[0] for said in writer.trouble] == ["steps.jsonl", "layers.jsonl", "findings.json"]
    assert writer.trouble[0].startswith("steps.jsonl: some data could not be written and was left out: TypeError(")
    assert [bucket.first for bucket in Run.read(writer.folder).steps] == [2]


def test_a_short_write_is_finished(make):
    class Slow:
        def __init__(self, file):
            self.file, self.close = file, file.close

        def write(self, data):
            return self.file.write(bytes(data[:7]))

    writer = make()
    writer._steps._file = Slow(writer._steps._file)
    for step in range(1, 20):
        writer.step(row(step))
    writer.close("finished", 0)
    assert [bucket.first for bucket in Run.read(writer.folder).steps] == list(range(1, 20))


def test_a_slow_disk_is_asked_less_often(make, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(files.time, "perf_counter", lambda: clock[0])
    writer = make()
    writes = []

    class Slow:
        def __init__(self, file):
            self.file, self.close = file, file.close

        def write(self, data):
            clock[0] += 0.010
            writes.append(clock[0])
            return self.file.write(data)

    writer._steps._file = Slow(writer._steps._file)
    for step in range(1, 1001):
        clock[0] += 0.005
        writer.step(row(step))
    assert 4 <= len(writes) <= 7  # 10 ms each, in 5 s
    writer.close("finished", 0)
    assert len(Run.read(writer.folder).steps) == 1000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_writes_nothing(make):
    writer = make()
    writer.step(row(1))
    child = os.fork()
    if child == 0:
        writer.step(row(2))
        writer.findings([seen()])
        writer.flush()
        writer.close("failed", 1)
        os._exit(0)
    os.waitpid(child, 0)
    writer.step(row(3))
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert [bucket.first for bucket in run.steps] == [1, 3]
    assert (run.status, run.findings) == ("finished", [])


# --- killed --------------------------------------------------------------------------------------------------------

ENDLESS = """
    import sys
    from ampwise.runs.rows import StepRow
    from ampwise.runs.writer import RecordLimits
    from ampwise.runs.writer import RecordWriter
    writer = RecordWriter.create(sys.argv[1], limits=RecordLimits(rows=2000))
    step = 0
    while True:
        step += 1
        writer.step(StepRow(step=step, loss=1 / step, skipped=step % 10 == 0))
        if step % 100 == 0:
            writer.fact("steps", step)
        if step == int(sys.argv[2]):
            writer.flush()
            print("there", flush=True)
"""


@pytest.mark.parametrize("after", [1, *by_night(1999), 20_000])
def test_what_a_kill_leaves(tmp_path, after):
    folder = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENDLESS), str(folder), str(after)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"there\n"
        alive = Run.read(folder)
        assert (alive.status, alive.alive) == ("running or killed", True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    run = Run.read(folder)
    assert (run.status, run.alive, run.trouble) == ("running or killed", False, [])
    whole = merge_buckets(run.steps)
    assert (whole.first, whole.count) == (1, whole.last)  # no step is missing
    assert whole.skipped == whole.last // 10
    assert whole.loss.high == 1.0
    assert whole.last >= after


def test_steps_that_take_time_are_in_the_file_at_once(make):
    writer = make()
    for step in range(1, 11):
        writer._steps._due = 0.0  # the last was written long ago
        writer.step(row(step))
        assert len((writer.folder / "steps.jsonl").read_bytes().splitlines()) == step


# --- size ----------------------------------------------------------------------------------------------------------


def test_a_long_run_keeps_fewer_points_and_loses_no_extreme(make):
    writer = make(limits=SMALL)
    largest = 0
    for step in range(1, 6_001):
        changes = {"loss": 1e6} if step == 777 else {"norm": float("nan"), "skipped": True} if step == 5000 else {}
        writer.step(row(step, **changes))
        largest = max(largest, writer._steps.lines)
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert largest <= SMALL.rows * 1.5  # lines come in bursts of a buffer
    assert len(run.steps) <= SMALL.rows * 1.5
    whole = merge_buckets(run.steps)
    assert (whole.first, whole.last, whole.count, whole.skipped) == (1, 6_000, 6_000, 1)
    assert (whole.loss.high, whole.norm.nans) == (1e6, 1)
    (spike,) = [bucket for bucket in run.steps if bucket.loss.high == 1e6]
    assert spike.first <= 777 <= spike.last
    assert all(bucket.count == 1 for bucket in run.steps[-SMALL.recent_rows :])
    sizes = {bucket.count for bucket in run.steps[: SMALL.rows // 16]}
    assert len(sizes) == 1  # equally dense, not denser towards the end


def test_samples_of_layers_are_merged_and_asked_for_less_often(make):
    writer = make(limits=SMALL)
    every, total, taken = [], Census(), 0
    for step in range(1, 501):
        every.append(writer.sample_every(step))
        if step % writer.sample_every(step) == 0:
            one = sample(step)
            total, taken = total + one.layers["weight"], taken + 1
            writer.layers(one)
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert len(run.layers) <= SMALL.samples
    assert (every[0], every == sorted(every), every[-1]) == (1, True, 32)
    assert sum(one.steps for one in run.layers) == taken
    assert run.total_layers()["weight"] == total
    assert [one.first for one in run.layers] == sorted(one.first for one in run.layers)


def test_large_samples_are_merged_by_their_size(make):
    writer = make(limits=RecordLimits(layer_bytes=20_000))
    for step in range(1, 200):
        writer.layers(sample(step, names=[f"layer{number}" for number in range(20)]))
    writer.close("finished", 0)
    assert writer.folder.joinpath("layers.jsonl").stat().st_size < 16 * 3000
    assert sum(one.steps for one in Run.read(writer.folder).layers) == 199


def test_samples_are_merged_a_few_at_a_time(make, monkeypatch):
    merges = []
    merge = json_lines._merge_samples
    monkeypatch.setattr(json_lines, "_merge_samples", lambda *given: (merges.append(1), merge(*given))[1])
    writer = make(limits=RecordLimits(samples=64))
    for step in range(1, 96):
        before = len(merges)
        writer.layers(sample(step))
        assert len(merges) - before <= 1
        lines = (writer.folder / "layers.jsonl").read_bytes().count(b"\n")
        assert lines == (step if step < 64 else step - 32)
    assert (writer.folder / "layers.jsonl.new").exists()  # the next ones
    writer.close("finished", 0)
    assert not list(writer.folder.glob("*.new"))
    assert [each.steps for each in Run.read(writer.folder).layers] == [2] * 32 + [1] * 31
    assert not writer.trouble


def test_many_optimizers_do_not_make_it_thin_at_every_step(make, monkeypatch):
    writer = make(limits=RecordLimits(rows=40, samples=8, buffer_bytes=1))
    thinned = []
    rewrite = files.AppendOnlyFile.rewrite
    monkeypatch.setattr(files.AppendOnlyFile, "rewrite", lambda *given: (thinned.append(1), rewrite(*given)))
    for step in range(1, 4):
        for optimizer in range(60):
            writer.step(row(step, optimizer))
            writer.layers(sample(step, optimizer))
    writer.close("finished", 0)
    run = Run.read(writer.folder)
    assert len(thinned) < 40
    assert merge_buckets(run.steps).count == 180
    assert {bucket.optimizer for bucket in run.steps} == set(range(60))
    assert sum(each.steps for each in run.layers) == 180


@pytest.mark.nightly
def test_a_week_of_steps_stays_small(make, record_property):
    """Steps as they are, and the samples of 300 tensors as large as these get: under 200 MB together.

    A million of them at night. By day enough to be thinned twice: from then on it only happens again.
    """
    writer = make()
    last = 1_000_000 if NIGHTLY else 2 * RecordLimits().rows
    peak, spent = 0, 0.0
    for first in range(1, last + 1, 1000):
        rows = [row(step) for step in range(first, first + 1000)]
        began = time.perf_counter()
        for one in rows:
            writer.step(one)
        spent += time.perf_counter() - began
        peak = max(peak, writer._steps.bytes)
    writer.flush()
    record_property("microseconds_per_step", spent / last * 1e6)  # a fact about the machine, not a claim
    assert peak < 25_000_000
    limits = RecordLimits()
    counts = {exponent: 10**12 + exponent for exponent in range(-60, 0)}  # sums over a week
    census = Census(binades=counts, amax=0.7123456789012345, amin=2.0**-59.5, sum_squares=1 / 3, zeros=10**12)
    names = [f"transformer.blocks.{number}.attention.projection.weight" for number in range(300)]
    writer.layers(LayerSample(first=1, last=1, layers=dict.fromkeys(names, census)))
    each = writer._layers.bytes
    assert 1.5 * (peak + limits.layer_bytes + each) < 200_000_000  # half more while it is thinned
    whole = merge_buckets(Run.read(writer.folder).steps)
    assert (whole.first, whole.last, whole.count) == (1, last, last)


def test_memory_stays_flat(make):
    writer = make(limits=SMALL)

    def train(first, last):
        for step in range(first, last):
            writer.step(row(step))
            if step % 10 == 0:
                writer.layers(sample(step))
            if step % 100 == 0:
                writer.findings([seen(count=step)])

    train(1, 1000)
    tracemalloc.start()
    try:
        train(1000, 2500)
        writer.flush()
        gc.collect()
        late, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert late < 20_000
    assert peak < 300_000  # while it is thinned


def test_the_findings_on_disk_are_those_reported_last(make):
    writer = make()
    writer.findings([seen("one"), seen("two")])
    writer.findings([seen("three", count=7)])
    data = json.loads((writer.folder / "findings.json").read_text())
    assert [(entry["code"], entry["message"], entry["count"]) for entry in data["findings"]] == [("AMP998", "three", 7)]
    assert data["rules"]["AMP998"]["why"] == "Because."
