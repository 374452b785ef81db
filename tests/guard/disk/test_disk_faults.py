"""Killed at any operation, without room, without permission: the last checkpoint stays whole, and a line says why."""

import errno
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ampwise.guard.disk import catalog, writing
from ampwise.guard.disk.catalog import checkpoints, prune, verify
from ampwise.guard.disk.exchange import CheckpointNotSaved
from ampwise.runs import files

from .disk_toys import save


@pytest.fixture(scope="module")
def after_kills(warm, tmp_path_factory):
    """What was left each time, by what was going on."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    folder, program = tmp_path_factory.mktemp("killed"), Path(__file__).with_name("disk_killing.py")
    done = warm.run(str(program), str(folder), cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_crash_at_every_operation_leaves_the_previous_one_whole(after_kills):
    left = after_kills["writing_at_every_operation"]
    assert len(left) > 20
    assert [each["died"] for each in left] == [True] * (len(left) - 1) + [False]
    for each in left:
        assert each["found"][-1] == {"step": 1, "trouble": "", "good": False}
        assert all(not one["trouble"] for one in each["found"])  # the new one is whole, or not there
        assert each["then"] == each["found"]
        assert not [name for name in each["names"] if name.startswith(".")]
    assert len(left[0]["found"]) == 1
    assert left[-1]["found"][0]["step"] == 2


def test_a_crash_while_pruning_leaves_the_good_and_the_newest(after_kills):
    left = after_kills["pruning_at_every_operation"]
    assert len(left) > 8
    for each in left:
        steps = {one["step"]: one for one in each["found"]}
        assert not [one for one in each["found"] if one["trouble"]]
        assert steps[1]["good"]
        assert 4 in steps
        assert not [name for name in each["names"] if name.startswith(".")]
    assert [one["step"] for one in left[-1]["found"]] == [4, 1]


def test_sigkill_at_any_moment(after_kills):
    left = after_kills["killed_at_any_moment"]
    assert len(left) == 6
    for each in left:
        assert each["found"]
        assert not [one for one in each["found"] if one["trouble"]]
        assert each["then"] == each["found"][:3]
    assert all(each["then"][0]["step"] > 1 for each in left), "each was killed while it wrote further ones"


# --- no room, no permission ----------------------------------------------------------------------------------------


def fails(folder, text, number=None, before=1, **options):
    """Writing fails with a line that says why; what was there is there, and nothing else."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    with pytest.raises(CheckpointNotSaved, match=text) as raised:
        save(folder, 2, **options)
    error = raised.value
    assert isinstance(error, OSError)
    assert str(error).startswith(f"a checkpoint of step 2 cannot be written to {folder}: ")
    assert "\n" not in str(error)
    assert error.errno == number
    assert not writing.BEING_WRITTEN
    if folder.is_dir():
        assert sorted(path.name for path in folder.iterdir()) == names
        assert len(checkpoints(folder)) == before
        for each in checkpoints(folder):
            verify(each)


def test_a_file_may_not_grow(tmp_path):
    save(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        fails(tmp_path, "File too large. Free some disk space", errno.EFBIG, tensors={"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(tmp_path, 2)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(small_disk, monkeypatch):
    save(small_disk)
    large = {"w": torch.zeros(1_000_000)}
    fails(
        small_disk,
        r"it needs about 5,000,0\d\d bytes, and [\d,]+ are free. Free some disk space",
        errno.ENOSPC,
        tensors=large,
    )
    plenty = shutil.disk_usage(small_disk)._replace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: plenty)  # as when another fills it meanwhile
    fails(
        small_disk,
        "No space left on device. Free some disk space, or name another folder.",
        errno.ENOSPC,
        tensors=large,
    )
    assert save(small_disk, 3).number == 2  # there is room again


def test_a_disk_that_has_become_read_only(small_disk):
    save(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    fails(small_disk, "Read-only file system. Name a writable folder.", errno.EROFS)
    assert prune(small_disk, 1) == []


def test_permission_lost(tmp_path):
    if not os.getuid():
        pytest.skip("root may write anywhere")
    save(tmp_path)
    tmp_path.chmod(0o500)
    fails(tmp_path, "Permission denied. Name a writable folder.", errno.EACCES)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", "File exists. Name another folder.", errno.EEXIST)
    fails(tmp_path / "file" / "below", "Not a directory", errno.ENOTDIR)


@pytest.mark.parametrize("call", range(1, 8))
def test_a_disk_that_fails_to_sync(tmp_path, monkeypatch, call):
    """Each fsync of those that there are: two files and their folder, the manifest, its seal, both folders."""
    save(tmp_path)
    sync, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    fails(tmp_path, "Input/output error", errno.EIO)
    assert len(calls) == call
    calls[:] = [0] * 10
    save(tmp_path, 2)
    assert len(calls) == 17


def test_a_disk_that_keeps_something_else(tmp_path, monkeypatch):
    save(tmp_path)
    replace = os.replace

    def flipping(source, target):
        if str(source).endswith("safetensors.new"):
            data = bytearray(Path(source).read_bytes())
            data[-1] ^= 1
            Path(source).write_bytes(data)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", flipping)
    fails(tmp_path, "tensors-00000.safetensors differs from what was written when read back", errno.EIO)


def test_folders_that_cannot_be_synced_at_all_are_no_failure(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(catalog.os, "fsync", fsync)
    catalog.sync_folder(tmp_path)


@pytest.mark.parametrize("now", [0.0, -(2.0**40), 2.0**40])
def test_a_clock_that_was_moved_orders_nothing(tmp_path, monkeypatch, now):
    save(tmp_path, 1)
    monkeypatch.setattr(writing.time, "time", lambda: now)
    save(tmp_path, 2)
    assert [each.step for each in checkpoints(tmp_path)] == [2, 1]
    assert checkpoints(tmp_path)[0].saved == now
