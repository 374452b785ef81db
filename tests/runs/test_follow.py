"""Following a record: whatever happens to it, what the follower has is what reading it anew gives."""

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampwise import BadInput
from ampwise.runs import files, reader
from ampwise.runs.reader import RecordFollower, Run
from ampwise.runs.writer import RecordLimits, RecordWriter

from .record_toys import change_manifest, row, sample, seen

SMALL = RecordLimits(rows=12, samples=4, buffer_bytes=200)  # thinned every few steps


class Followed:
    """A follower, and what it saw last."""

    def __init__(self, folder):
        self.follower, self.run = RecordFollower(folder), None

    def agrees(self):
        """Look, and compare with a reading anew; whether anything was new."""
        fresh = self.follower.look()
        self.run = fresh or self.run
        anew = Run.read(self.follower.folder, layers_of_others=False)
        assert (self.run, self.run.status) == (anew, anew.status)
        return fresh is not None


# --- the law -------------------------------------------------------------------------------------------------------


class Training:
    """A process that trains, with all that may become of its record."""

    def __init__(self, folder):
        self.folder, self.step, self.life = folder, 0, 0
        self.writers = [RecordWriter.create(folder, force=True, world_size=2, limits=SMALL)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for writer in self.writers:
            writer.close("finished", 0)

    def one_step(self):
        self.step += 1
        for writer in self.writers:
            writer.step(row(self.step, optimizer=self.step % 2, loss=self.life + self.step / 8))

    def many_steps(self):
        for _ in range(2 * SMALL.rows):  # two thinnings: the second file may get the number of the first again
            self.one_step()

    def layers(self):
        for writer in self.writers:
            writer.layers(sample(self.step + 1, scale=2.0**self.life))

    def findings(self):
        self.writers[-1].findings([seen(f"at {self.step % 10}", count=3)])

    def fact(self):
        self.writers[0].fact("steps", self.step)

    def flush(self):
        for writer in self.writers:
            writer.flush()

    def late_rank(self):
        if len(self.writers) == 1:
            self.writers.append(RecordWriter.create(self.folder, rank=1, world_size=2, force=True, limits=SMALL))

    def lost_file(self):
        (self.folder / "findings.json").unlink(missing_ok=True)

    def torn_line(self):
        with (self.folder / "steps.jsonl").open("ab") as file:
            file.write(b'{"s":999,"t":0.5}'[: 10 + self.step % 8])

    def garbage(self):
        with (self.folder / "layers.jsonl").open("ab") as file:
            file.write(b"nonsense\n")

    def begun_anew(self):
        self.__exit__()
        self.step, self.life = 0, self.life + 1
        self.writers = [RecordWriter.create(self.folder, force=True, world_size=2, limits=SMALL)]

    def end(self):
        self.writers[0].close("failed", 1, ValueError("no data"))


EVENTS = [name for name in vars(Training) if not name.startswith("_")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from([*EVENTS, *["one_step", "layers", "look"] * 4]), max_size=60))
def test_a_follower_has_what_a_reader_has(tmp_path, events):
    followed = Followed(tmp_path / "run")
    with Training(tmp_path / "run") as training:
        for event in [*events, "look"]:
            if event == "look":
                followed.agrees()
                assert not followed.agrees()  # nothing came between
            else:
                getattr(training, event)()


# --- cheaply -------------------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch):
    """The lines that were parsed, in order."""
    lines = []
    monkeypatch.setattr(reader, "read_bucket", lambda line, read=reader.read_bucket: lines.append(line) or read(line))
    return lines


def test_only_what_was_added_is_read(tmp_path, parsed):
    writer = RecordWriter.create(tmp_path / "run")
    follower = RecordFollower(tmp_path / "run")
    for step in range(1, 101):
        writer.step(row(step))
        writer.flush()
        assert len(follower.look().steps) == step
    assert len(parsed) == 100
    writer.close("finished", 0)


def test_nothing_stays_open_and_nothing_is_written(tmp_path):
    writer = RecordWriter.create(tmp_path / "run")
    writer.step(row(1))
    writer.close("finished", 0)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()}
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    follower = RecordFollower(tmp_path / "run")
    follower.look()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()} == before


# --- one thing at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    writer = RecordWriter.create(tmp_path / "run")
    for step in range(1, 6):
        writer.step(row(step))
    writer.flush()
    yield tmp_path / "run"
    writer.close("finished", 0)


def test_a_torn_line_waits_for_its_rest(record):
    followed = Followed(record)
    followed.agrees()
    line = b'{"s":6,"t":0.5,"l":2.5}\n'
    for byte in range(len(line)):
        with (record / "steps.jsonl").open("ab") as file:
            file.write(line[byte : byte + 1])
        followed.agrees()
    assert [bucket.last for bucket in followed.run.steps] == [1, 2, 3, 4, 5, 6]
    assert followed.run.trouble == []


def test_a_file_of_the_same_number_and_size_is_read_anew(record):
    followed = Followed(record)
    followed.agrees()
    path = record / "steps.jsonl"
    number, data = path.stat().st_ino, path.read_bytes()
    with path.open("r+b") as file:  # in place, longer, and with other lines
        file.write(data.replace(b'"s":', b'"s":1') + b'{"s":77,"t":1.0}\n')
    assert path.stat().st_ino == number
    followed.agrees()
    assert [bucket.last for bucket in followed.run.steps] == [11, 12, 13, 14, 15, 77]


def test_findings_again_and_again(tmp_path):
    writer = RecordWriter.create(tmp_path / "run")
    followed = Followed(tmp_path / "run")
    for number in range(20):
        writer.findings([seen(f"{number:03}")])
        assert followed.agrees()
    writer.close("finished", 0)


def test_broken_lines_before_a_torn_one_are_counted_as_a_reader_counts(record):
    followed = Followed(record)
    for text in (b"nonsense\n", b'{"s":6,', b"no end\n", b'{"s":7'):
        with (record / "steps.jsonl").open("ab") as file:
            file.write(text)
        followed.agrees()
    told = "steps.jsonl: 2 of 8 lines cannot be read and were ignored; the first is line 6."
    assert followed.run.trouble == [told]


def test_what_vanishes_is_reported_and_comes_back(record):
    followed = Followed(record)
    followed.agrees()
    data = (record / "steps.jsonl").read_bytes()
    (record / "steps.jsonl").unlink()
    assert followed.agrees()
    assert followed.run.trouble == ["steps.jsonl is missing."]
    (record / "steps.jsonl").write_bytes(data)
    assert followed.agrees()
    assert (len(followed.run.steps), followed.run.trouble) == (5, [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_or_a_link_in_its_place_is_reported(record, tmp_path):
    followed = Followed(record)
    followed.agrees()
    (record / "layers.jsonl").unlink()
    os.mkfifo(record / "layers.jsonl")
    assert followed.agrees()
    assert "layers.jsonl is not a regular file" in followed.run.trouble[0]
    (record / "layers.jsonl").unlink()
    (record / "layers.jsonl").symlink_to(tmp_path / "elsewhere")
    assert followed.agrees()
    assert "layers.jsonl is a link" in followed.run.trouble[0]


def test_a_file_that_is_too_large_is_reported(record, monkeypatch):
    monkeypatch.setattr(reader, "STEP_LIMITS", reader.STEP_LIMITS._replace(bytes=100))
    followed = Followed(record)
    followed.agrees()
    assert followed.run.trouble == ["steps.jsonl cannot be read: it has more than 100 bytes."]
    assert followed.run.steps == []


def test_lines_beyond_what_a_record_has_are_left_out_and_reported(record, monkeypatch):
    monkeypatch.setattr(reader, "STEP_LIMITS", reader.STEP_LIMITS._replace(lines=3))
    followed = Followed(record)
    followed.agrees()
    assert followed.run.trouble == ["steps.jsonl cannot be read: it has more than 3 lines, and the rest was ignored."]
    assert len(followed.run.steps) == 3


def test_a_rank_that_comes_half_made(record):
    followed = Followed(record)
    followed.agrees()
    (record / "rank1").mkdir()
    assert followed.agrees()
    assert "rank1 is not a record" in followed.run.trouble[0]
    writer = RecordWriter.create(record, rank=1, world_size=2, force=True)
    writer.step(row(1))
    writer.close("finished", 0)
    assert followed.agrees()
    assert (list(followed.run.ranks), len(followed.run.ranks[1].steps), followed.run.trouble) == ([1], 1, [])


def test_a_record_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        RecordFollower(tmp_path / "nowhere").look()


def test_a_manifest_of_a_newer_version_is_refused_and_forgiven(record):
    followed = Followed(record)
    followed.agrees()
    with (record / "steps.jsonl").open("ab") as file:
        file.write(b'{"s":6,"t":0.5}\n')
    change_manifest(record, version=99)
    for _ in range(2):
        with pytest.raises(BadInput, match="record of version 99"):
            followed.follower.look()
    change_manifest(record, version=1)
    assert followed.agrees()  # the step that came meanwhile
    assert len(followed.run.steps) == 6


def test_when_it_was_last_written(record):
    before = time.time()
    os.utime(record / "steps.jsonl", (before + 7, before + 7))
    assert RecordFollower(record).written == pytest.approx(before + 7)
    assert RecordFollower(record / "nowhere").written is None


def test_while_it_is_written(tmp_path):
    """Every look has a start of the run: no step twice, none left out, none made up."""
    writer = RecordWriter.create(tmp_path / "run", limits=RecordLimits(rows=64, samples=8, buffer_bytes=500))

    def train():
        for step in range(1, 3001):
            writer.step(row(step))
            if step % 20 == 0:
                writer.layers(sample(step))
        writer.close("finished", 0)

    thread = threading.Thread(target=train)
    thread.start()
    followed = Followed(tmp_path / "run")
    last = 0
    while thread.is_alive():
        run = followed.follower.look()
        if run is not None:
            followed.run = run
            reached = sum(bucket.count for bucket in run.steps)
            assert [bucket.first for bucket in run.steps] == sorted({bucket.first for bucket in run.steps})
            assert reached == max((bucket.last for bucket in run.steps), default=0) >= last
            assert run.trouble == []
            last = reached
    thread.join()
    followed.agrees()
    assert sum(bucket.count for bucket in followed.run.steps) == 3000


@pytest.mark.parametrize("name", ["manifest.json", "findings.json"])
def test_a_file_that_cannot_be_opened_for_a_moment_is_read_once_it_can(tmp_path, monkeypatch, name):
    """A shared disk that stumbles: afterwards nothing was written, and all is there again."""
    writer = RecordWriter.create(tmp_path / "run")
    writer.step(row(1))
    writer.findings([seen("something")])
    writer.flush()
    whole = Run.read(tmp_path / "run")
    refused = []

    def stumbling(path, *words, real=files.open_regular, **options):
        if refused and path.name == name:
            raise OSError(5, "Input/output error")
        return real(path, *words, **options)

    for module in (files, reader):
        monkeypatch.setattr(module, "open_regular", stumbling)
    follower = RecordFollower(tmp_path / "run")
    refused.append(name)
    assert name in " ".join(follower.look().trouble)
    refused.clear()
    assert follower.look() == whole
    writer.close("finished", 0)
