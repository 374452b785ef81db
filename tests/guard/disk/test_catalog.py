"""Which checkpoints there are, in which order, and which of them may go."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import BadInput
from ampwise.guard.disk import catalog
from ampwise.guard.disk.catalog import checkpoints, mark_bad, mark_good, next_number, prune
from ampwise.guard.disk.manifest import (
    CHECKPOINT_FILE,
    MANIFEST,
    SEAL,
    CheckpointManifest,
    StoredFile,
    plain_file,
    tensors_file,
)

from .disk_toys import save

STATES = ["good", "whole", "discredited", "cut off", "unreadable"]


def make(home, number, state):
    """A checkpoint without tensors, in one of the states it may be in."""
    folder = home / f"step-{number:08d}"
    folder.mkdir(parents=True)
    empty = StoredFile(0, hashlib.sha256(b"").hexdigest())
    manifest = CheckpointManifest(number, number, 0.0, 1, {}, {tensors_file(0): empty, plain_file(0): empty}, {})
    text = manifest.text()
    (folder / MANIFEST).write_text(text)
    (folder / SEAL).write_text(hashlib.sha256(text.encode()).hexdigest())
    (folder / tensors_file(0)).write_text("")
    if state != "cut off":
        (folder / plain_file(0)).write_text("")
    if state == "unreadable":
        (folder / MANIFEST).write_text("x")
    here = catalog._checkpoint(folder, number)
    if state == "good":
        mark_good(here)
    if state == "discredited":
        mark_bad(here, "weights are not finite")
    return folder


def test_there_is_nothing_where_nothing_was_written(tmp_path):
    assert checkpoints(tmp_path / "not there") == checkpoints(tmp_path) == []
    assert prune(tmp_path / "not there", 1) == []
    assert next_number(tmp_path) == 1


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file cannot be read: Not a directory\. Name a folder of checkpoints\."):
        checkpoints(tmp_path / "file")


@given(states=st.lists(st.sampled_from(STATES), max_size=7), keep=st.integers(1, 4))
def test_the_laws_of_pruning(tmp_path_factory, states, keep):
    home = tmp_path_factory.mktemp("checkpoints")
    paths = {make(home, number, state): state for number, state in enumerate(states, 1)}
    newest_first = list(reversed(paths))
    whole = [path for path in newest_first if paths[path] in {"good", "whole"}]
    good = [path for path in newest_first if paths[path] == "good"]
    gone = prune(home, keep)
    left = [each.path for each in checkpoints(home)]
    assert sorted([*left, *gone]) == sorted(paths)
    assert set(whole[:keep] + good[:1]) <= set(left)  # what must stay
    assert not (set(whole[keep:]) - set(good[:1])) & set(left)  # whole ones that must go
    assert all(paths[path] != "unreadable" for path in gone)  # nobody knows whose that was
    if len(whole) < keep:
        assert not gone
    else:  # what is newer than something that is kept is there to be looked at
        assert all(newest_first.index(path) > newest_first.index(whole[keep - 1]) for path in gone)
    assert prune(home, keep) == []
    assert sorted(path for path in home.iterdir() if not path.name.startswith("step-")) == []


@given(states=st.lists(st.sampled_from(STATES), max_size=6))
def test_newest_first_and_troubles_reported(tmp_path_factory, states):
    home = tmp_path_factory.mktemp("checkpoints")
    for number, state in enumerate(states, 1):
        make(home, number, state)
    found = checkpoints(home)
    assert [each.step for each in found] == list(range(len(states), 0, -1))
    told = {
        "good": "",
        "whole": "",
        "discredited": "weights are not finite",
        "cut off": "plain-00000.json is missing.",
        "unreadable": "checkpoint.json has changed since it was written: its checksum differs.",
    }
    assert [each.trouble for each in found] == [told[state] for state in reversed(states)]
    assert [each.good for each in found] == [state == "good" for state in reversed(states)]


def test_at_least_one_has_to_stay(tmp_path):
    with pytest.raises(BadInput, match="expected 1 or more"):
        prune(tmp_path, 0)


def test_nothing_but_our_own_is_removed(tmp_path):
    home, outside = tmp_path / "home", tmp_path / "outside"
    outside.mkdir()
    (outside / "plain-00000.json").write_text("mine")
    old, with_notes = make(home, 1, "whole"), make(home, 2, "whole")
    (with_notes / "notes.txt").write_text("mine")
    make(home, 3, "whole")
    foreign = [".step-00000001.old", "step-1", "best", ".step-00000001.0000000g.new"]
    for name in foreign:
        (home / name).mkdir()
        (home / name / "plain-00000.json").write_text("mine")
    (home / ".step-00000009.00000001.new").symlink_to(outside)
    (home / ".step-00000009.00000002.new").mkdir()
    (home / ".step-00000009.00000002.new" / "keep.me").write_text("mine")
    leftover = home / ".step-00000009.00000003.new"
    leftover.mkdir()
    (leftover / "tensors-00000.safetensors.new").write_text("half")
    (leftover / "plain-00000.json").symlink_to(outside / "plain-00000.json")
    (home / "step-00000000").symlink_to(outside)
    assert prune(home, 1) == [leftover, old]
    assert (outside / "plain-00000.json").read_text() == "mine"
    assert (with_notes / "notes.txt").exists()
    assert all((home / name / "plain-00000.json").exists() for name in foreign)
    assert (home / ".step-00000009.00000002.new" / "keep.me").exists()


def test_what_is_being_written_is_no_leftover(tmp_path, monkeypatch):
    writing = tmp_path / ".step-00000009.00000003.new"
    writing.mkdir()
    monkeypatch.setattr(catalog, "BEING_WRITTEN", {writing})
    assert prune(tmp_path, 1) == []
    assert writing.exists()


def test_all_that_is_written_is_ours_to_remove(tmp_path):
    mark_good(save(tmp_path))
    assert all(CHECKPOINT_FILE.fullmatch(path.name) for path in checkpoints(tmp_path)[0].path.iterdir())


def test_looking_needs_no_torch():
    code = (
        "import sys, ampwise.guard.disk.catalog, ampwise.guard.disk.lock, ampwise.cli.checkpoints\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
