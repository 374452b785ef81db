"""Disks that fail: training goes on, each failure is told, and what was whole stays so until something newer is."""

import errno
import os
import shutil
import subprocess
import threading

import pytest

from ampwise.errors import BadInput
from ampwise.guard.disk.catalog import checkpoints, verify

from .conftest import written
from .programs import BATCHES, Plan, Run, train

pytestmark = pytest.mark.usefixtures("way")

LAST = 4 * BATCHES
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def whole(directory):
    """Steps of checkpoints that are read through and found whole."""
    found = [each for each in checkpoints(directory) if not each.trouble]
    for each in found:
        verify(each)
    return [each.step for each in found]


def newest_whole(directory):
    """The step of the newest one, read through. On a slow machine those before may not have been written anew."""
    newest = checkpoints(directory)[0]
    verify(newest)
    return newest.step


def trained_with(monkeypatch, directory, at, breaks, **options):
    """A run on a disk that breaks when so many steps are done."""
    real = Run.write_down

    def breaking(self, number, samples):
        real(self, number, samples)
        if number in at:
            if len(at) > 1:  # for a while
                self.be_written()
            breaks(number)

    monkeypatch.setattr(Run, "write_down", breaking)
    outcome = train(directory, **options)
    monkeypatch.setattr(Run, "write_down", real)
    return outcome


# --- that cannot be written to -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ROOT and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=False).returncode
    if mounted != 0:
        pytest.skip("needs to be allowed to mount a disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_full_and_then_is_not(small_disk, monkeypatch, tmp_path):
    filler = small_disk / "filler"

    def fill_or_empty(number):
        if number == 15:
            free = shutil.disk_usage(small_disk).free
            filler.write_bytes(bytes(free - 8192))
        else:
            filler.unlink()

    outcome = trained_with(monkeypatch, small_disk / "run", (15, 36), fill_or_empty)
    assert outcome.code == 0
    assert outcome.told
    assert set(outcome.told) == {"checkpoint-failed"}
    assert all("the disk is full" in message and "training continues" in message for message in outcome.messages)
    assert outcome.weights == train(tmp_path / "whole").weights
    assert whole(small_disk / "run")[0] == LAST, "and the last one is there"
    assert not list((small_disk / "run").glob(".step-*")), "nothing is left of those that failed"


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_disk_that_stays_full_keeps_what_is_whole(small_disk, monkeypatch, from_the_start):
    """The last checkpoint cannot be written either; the run has come to its end all the same, and says so."""
    before = [] if from_the_start else whole_before(small_disk / "run")
    outcome = trained_with(
        monkeypatch,
        small_disk / "run",
        (before[0] + 1 if before else 1,),
        lambda _: (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192)),
        guard={"every": "5 steps", "keep": 1},
    )
    assert outcome.code == 0
    assert set(outcome.told) == {"checkpoint-failed"}
    assert ("there is no complete one yet" in outcome.messages[-1]) == from_the_start
    assert "failure in a row" in outcome.messages[-1]
    assert whole(small_disk / "run") == before


def whole_before(directory):
    train(directory, epochs=1, guard={"keep": 1})
    return whole(directory)


def test_a_limit_on_the_size_of_files(children, tmp_path):
    """A quota is met in the middle of a write, whatever the disk says is free."""
    ended = children.train(tmp_path / "run", largest_file=4096)
    assert ended.code == 0, ended.said
    assert set(ended.outcome.told) == {"checkpoint-failed"}
    assert whole(tmp_path / "run") == []
    assert not list((tmp_path / "run").glob(".step-*"))


def test_a_disk_that_becomes_read_only(tmp_path, monkeypatch):
    """Not remounted: that is refused as long as the lock is open."""
    real, broken = os.mkdir, False

    def mkdir(*args, **kwargs):
        if broken:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(*args, **kwargs)

    def break_or_mend(number):
        nonlocal broken
        broken = number == 15

    monkeypatch.setattr("os.mkdir", mkdir)
    outcome = trained_with(monkeypatch, tmp_path / "run", (15, LAST - 2), break_or_mend)
    assert set(outcome.told) == {"checkpoint-failed"}
    assert all("read-only" in message.lower() for message in outcome.messages)
    assert whole(tmp_path / "run")[0] == LAST


def test_a_folder_that_is_no_longer_ours_to_write_to(children, tmp_path):
    (tmp_path / "run").mkdir()
    ended = children.train(tmp_path / "run", forbid_at=[15, 36])
    assert ended.code == 0, ended.said
    assert set(ended.outcome.told) == {"checkpoint-failed"}
    assert any("permission" in message.lower() for message in ended.outcome.messages)
    assert whole(tmp_path / "run")[0] == LAST


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)  # a checkpoint may be on its way out at the same time


def test_a_folder_that_is_removed_is_made_again(tmp_path, monkeypatch):
    outcome = trained_with(monkeypatch, tmp_path / "run", (15,), lambda _: remove(tmp_path / "run"))
    assert outcome.code == 0
    assert whole(tmp_path / "run")[0] == LAST


def test_a_folder_that_cannot_be_had_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot create this directory") as refused:
        train(tmp_path / "file" / "run")
    assert "\n" not in str(refused.value)


def test_a_disk_that_errs(tmp_path, monkeypatch):
    real = os.fsync
    broken = False

    def fsync(descriptor):
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    def break_or_mend(number):
        nonlocal broken
        broken = number == 15

    monkeypatch.setattr("os.fsync", fsync)
    outcome = trained_with(monkeypatch, tmp_path, (15, 36), break_or_mend)
    assert set(outcome.told) == {"checkpoint-failed"}
    assert "Input/output error" in outcome.messages[0]
    assert whole(tmp_path)[0] == LAST


def test_a_slow_disk_makes_no_step_wait(tmp_path, monkeypatch):
    """Written beside the training: one checkpoint at a time, and a finding where it cannot keep up.

    The disk does not answer before thirty more steps are done: a step that waited for it would never end. That a
    checkpoint is good is written beside the training, too.
    """
    real, answers, stalled = os.fsync, threading.Event(), []

    def fsync(descriptor):
        if not answers.is_set():
            stalled.append(threading.current_thread().name)
            assert answers.wait(120), "a step waits for the checkpoint"
        real(descriptor)

    write_down = Run.write_down

    def slow(self, number, samples):
        write_down(self, number, samples)
        if number == 5:
            self.be_written()
            monkeypatch.setattr("os.fsync", fsync)
        if number == 35:
            answers.set()

    monkeypatch.setattr(Run, "write_down", slow)
    monkeypatch.setattr("ampwise.guard.checkpointing.LATE_S", 0.0)
    outcome = train(tmp_path, guard={"every": "2 steps"})
    assert outcome.told == []
    assert outcome.late
    assert set(stalled) <= {"ampwise-guard-save", "ampwise-guard-mark"}
    assert stalled.count("ampwise-guard-save") == 1, "one checkpoint is written at a time"
    assert whole(tmp_path)[0] == LAST


# --- that has lost something ---------------------------------------------------------------------------------------


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"truncated": cut, "a bit flipped": flip, "missing": os.unlink}
FILES = ["tensors-00000.safetensors", "plain-00000.json", "checkpoint.json"]


@pytest.fixture(scope="module")
def half(way, tmp_path_factory):
    """A run of two epochs, with its checkpoints; and what becomes of it when it is not broken."""
    folder = tmp_path_factory.mktemp("half")
    train(folder / "run", epochs=2, guard={"every": "1000 steps"}, save_at=(12, 18))
    return folder / "run", train(folder / "whole")


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_of_and_the_one_before_is_used(half, tmp_path, damage, file):
    directory, unbroken = tmp_path / "run", half[1]
    shutil.copytree(half[0], directory)
    newest = checkpoints(directory)[0]
    assert newest.step == 24
    DAMAGES[damage](newest.path / file)
    outcome = train(directory)
    assert outcome.told == ["checkpoint-damaged"]
    assert "step-00000018 is used instead" in outcome.messages[0]
    assert outcome.began_at == 18
    assert outcome.weights == unbroken.weights
    assert newest_whole(directory) == LAST


def test_where_all_are_damaged_nothing_is_begun_in_their_place(half, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(half[0], directory)
    for each in checkpoints(directory):
        flip(each.path / FILES[0])
    with pytest.raises(BadInput, match="none can be resumed") as refused:
        train(directory)
    assert "\n" not in str(refused.value)
    assert len(checkpoints(directory)) == 3


@written("engine")
def test_weights_in_a_checkpoint_that_are_not_finite_are_not_gone_on_from(half, tmp_path):
    """Whole, sealed, and useless: as written by a version that did not look."""
    directory = tmp_path / "run"
    shutil.copytree(half[0], directory)
    run = Run(Plan(directory=str(directory)))
    run.guard.begin()
    import torch

    from ampwise.guard.disk.writing import write_checkpoint
    from ampwise.guard.state import TrainingState
    from ampwise.runs.plain_data import to_json

    live = TrainingState(run.engine, {}).live()
    live.plain.update(run.guard._extra_state())
    spoilt = {name: tensor.detach().clone() for name, tensor in live.tensors.items()}
    spoilt["model.net.0.weight"][0, 0] = torch.nan
    plain = to_json(live.plain, "the state")
    write_checkpoint(directory, step=25, live=live.tensors, staged=spoilt, plain=plain, about={}, group=None)
    run.guard.close()
    outcome = train(directory)
    assert outcome.told == ["checkpoint-damaged"]
    assert "inf or NaN" in outcome.messages[0]
    assert outcome.began_at == 24
    assert outcome.weights == half[1].weights


# --- two runs ------------------------------------------------------------------------------------------------------


@written("engine")
@pytest.mark.nightly
def test_a_second_run_in_the_directory_is_refused(children, tmp_path):
    first = Run(Plan(directory=str(tmp_path / "run")))
    with first.guard:
        second = children.train(tmp_path / "run")
        assert second.code == 1
        refusal = second.said.strip().splitlines()[-1]
        assert f"is in use by process {os.getpid()} on" in refusal
        assert second.outcome is None
        first.train()
    assert whole(tmp_path / "run")[0] == LAST


@pytest.mark.nightly
def test_the_lock_of_a_run_that_is_no_more_is_taken_over(children, tmp_path):
    killed = children.train(tmp_path / "run", kill_at_batch=20)
    assert killed.code == -9
    outcome = train(tmp_path / "run")
    assert outcome.told[0] == "lock-taken-over"
    assert "which no longer exists" in outcome.messages[0]
    assert outcome.code == 0
