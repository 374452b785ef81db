"""What has changed since it was written is refused, before anything is run, allocated or written to."""

import hashlib
import io
import json
import os
import pickle
import random
import struct
import time
import tracemalloc
import zipfile

import pytest
import torch

from ampwise.errors import BadInput
from ampwise.guard.disk.catalog import checkpoints, mark_bad, mark_good, verify
from ampwise.guard.disk.manifest import LARGEST_MANIFEST, MANIFEST, MARK, SEAL, DamagedCheckpoint

from .disk_toys import FILE, PLAIN, forge, forge_file, read_all, read_into, read_plain, save, stored_tensors

FILES = (FILE, PLAIN, MANIFEST, SEAL)


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path, plain={"step": 1})


def refused(checkpoint):
    """Whether it is refused, by what reads all of it and by what a resume does; and no tensor is written to then."""
    target = torch.zeros(3, 4)
    told = [trouble(verify, checkpoint), trouble(resume, checkpoint, target)]
    assert bool(told[0]) == bool(told[1]), told
    assert "\n" not in "".join(told)
    assert not (told[1] and target.any())
    return bool(told[0])


def resume(checkpoint, target):
    read_plain(checkpoint, 0)
    read_into(checkpoint, {"w": target}, None)


def trouble(reads, *arguments):
    try:
        reads(*arguments)
    except DamagedCheckpoint as error:
        return str(error)
    return ""


def test_a_whole_one_is_not_refused(checkpoint):
    assert not refused(checkpoint)
    assert torch.equal(read_all(checkpoint)["w"], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("name", FILES)
def test_cut_off_at_any_byte(checkpoint, name):
    path = checkpoint.path / name
    data = path.read_bytes()
    lengths = {0, 1, len(data) - 1, *random.Random(1).sample(range(len(data)), min(20, len(data)))}
    lengths -= {len(data) - 1} if name == SEAL else set()  # its newline, which says nothing
    for length in lengths:
        if name == SEAL and length >= 64:
            continue  # all of the checksum is there
        path.write_bytes(data[:length])
        assert refused(checkpoint), length
        assert checkpoints(checkpoint.path.parent)[0].trouble
    path.write_bytes(data)
    assert not refused(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_any_bit_flipped(checkpoint, name):
    path = checkpoint.path / name
    data = path.read_bytes()
    size = 64 if name == SEAL else len(data)
    for place in random.Random(2).sample(range(size), min(25, size)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        assert refused(checkpoint), place


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing(checkpoint, name):
    (checkpoint.path / name).unlink()
    assert refused(checkpoint)
    (found,) = checkpoints(checkpoint.path.parent)
    assert found.trouble == f"{name} is missing."
    assert found.step == 1


def test_no_tensor_is_written_to_when_a_later_file_is_damaged(checkpoint):
    data = bytearray((checkpoint.path / FILE).read_bytes())
    data[-1] ^= 1
    (checkpoint.path / FILE).write_bytes(data)
    target = torch.zeros(3, 4)
    with pytest.raises(DamagedCheckpoint, match="has changed since it was written: its checksum differs"):
        read_into(checkpoint, {"w": target}, None)
    assert not target.any()
    assert checkpoints(checkpoint.path.parent)[0].trouble == ""  # names and sizes do not tell


# --- made to do harm -----------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def zipped():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"0" * 10_000_000)
    return data.getvalue()


@pytest.mark.parametrize("data", [pickle.dumps(Bomb()), zipped()], ids=["pickle", "zip"])
@pytest.mark.parametrize("name", [FILE, PLAIN])
def test_pickles_and_zips_under_our_names_with_matching_sums(checkpoint, monkeypatch, name, data):
    monkeypatch.chdir(checkpoint.path.parent)
    forge_file(checkpoint, name, data)
    with pytest.raises(BadInput, match=f"{name}"):
        read_all(checkpoint)
    assert not (checkpoint.path.parent / "exploded").exists()


def test_a_pickle_beside_our_files_is_not_opened(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.path.parent)
    (checkpoint.path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert (
        checkpoints(checkpoint.path.parent)[0].trouble
        == "it contains '.metadata', which is not a file of a checkpoint."
    )
    with pytest.raises(DamagedCheckpoint, match="not a file of a checkpoint"):
        verify(checkpoint)
    assert not (checkpoint.path.parent / "exploded").exists()


def test_a_manifest_that_is_a_pickle(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.path.parent)
    forge(checkpoint, lambda facts: pickle.dumps(Bomb()))
    assert refused(checkpoint)
    assert not (checkpoint.path.parent / "exploded").exists()


def piece(facts):
    return facts["tensors"]["w"]["pieces"][0]


def to_file(name):
    def change(facts):
        facts["files"][name] = facts["files"].pop(FILE)
        piece(facts)["file"] = name

    return change


def pieces(*boxes):
    def change(facts):
        facts["tensors"]["w"]["pieces"] = [
            {"file": FILE, "key": f"w{place}", "offsets": offsets, "sizes": sizes}
            for place, (offsets, sizes) in enumerate(boxes)
        ]

    return change


def setting(*path, value):
    def change(facts):
        for key in path[:-1]:
            facts = facts[key]
        facts[path[-1]] = value

    return change


HUGE = 2**40
FORGED = {
    "path above": (to_file("../../etc/passwd"), "not a checkpoint file name"),
    "absolute path": (to_file("/etc/passwd"), "not a checkpoint file name"),
    "dots": (to_file(".."), "not a checkpoint file name"),
    "separator": (to_file(f"x/{FILE}"), "not a checkpoint file name"),
    "other name": (to_file("model.pkl"), "not a checkpoint file name"),
    "newline in name": (to_file(f"{FILE}\n"), "not a checkpoint file name"),
    "digits of another script": (to_file("tensors-0000\u0660.safetensors"), "not a checkpoint file name"),
    "more files than ranks": (
        setting("files", "tensors-00007.safetensors", value={"bytes": 1, "sha256": "0" * 64}),
        "two files for each of 1 ranks",
    ),
    "more ranks than files": (setting("world_size", value=2), "two files for each of 2 ranks"),
    "giant world": (setting("world_size", value=10**12), "invalid count 1000000000000"),
    "no ranks": (setting("world_size", value=0), "invalid count 0"),
    "negative step": (setting("step", value=-1), "invalid count -1"),
    "step that is a truth value": (setting("step", value=True), "expected int, got"),
    "negative size": (setting("files", FILE, "bytes", value=-1), "invalid count -1"),
    "no sum": (setting("files", FILE, "sha256", value="x"), "has no checksum"),
    "time without end": (setting("saved", value="Infinity"), "expected int, got"),
    "about that is none": (setting("about", value=[]), "expected dict, got"),
    "more in a file": (setting("files", FILE, "link", value="/etc"), "expected exactly the keys"),
    "no pieces": (pieces(), "overlap or do not cover it"),
    "piece outside": (pieces(([0, 1], [3, 4])), "outside of its shape"),
    "piece of too many dimensions": (pieces(([0, 0, 0], [3, 4, 1])), "outside of its shape"),
    "negative offset": (pieces(([-1, 0], [3, 4])), "invalid count -1"),
    "half of it": (pieces(([0, 0], [2, 4])), "overlap or do not cover"),
    "twice": (pieces(([0, 0], [3, 4]), ([0, 0], [3, 4])), "overlap or do not cover"),
    "overlap of the right volume": (pieces(([0, 0], [2, 4]), ([0, 0], [1, 4])), "overlap or do not cover"),
    "piece in plain data": (
        setting("tensors", "w", "pieces", 0, "file", value=PLAIN),
        "not one of its files of tensors",
    ),
    "piece in a file that is not": (
        setting("tensors", "w", "pieces", 0, "file", value="x"),
        "not one of its files of tensors",
    ),
    "name that moves the cursor": (
        lambda facts: facts["tensors"].update({"\x1b[2J": facts["tensors"].pop("w")}),
        "not a valid tensor name",
    ),
    "shape without end": (setting("tensors", "w", "shape", value=[2**62, 2**62, 0]), "an invalid shape"),
    "other format": (setting("format", value="x"), "not an ampwise checkpoint manifest"),
    "other version": (setting("version", value=1), "this ampwise reads version 3"),
    "missing part": (lambda facts: facts.pop("number") and None, "'number' is missing"),
    "not an object": (lambda facts: b"[]", "not an ampwise checkpoint manifest"),
    "not JSON": (lambda facts: b"{", "is damaged"),
    "NaN": (lambda facts: b'{"x": NaN}', "NaN is not valid JSON"),
    "twice the same name": (lambda facts: b'{"format": 1, "format": 2}', "duplicate name"),
    "nested without end": (lambda facts: b"[" * 100_000, "nested too deeply|is damaged"),
    "number without end": (lambda facts: b'{"step": ' + b"9" * 10_000 + b"}", "is damaged"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_with_a_matching_seal(checkpoint, case):
    change, text = FORGED[case]
    forge(checkpoint, change)
    (found,) = checkpoints(checkpoint.path.parent)
    assert found.trouble.isprintable()
    for reads in (verify, stored_tensors, read_all):
        with pytest.raises(DamagedCheckpoint, match=text):
            reads(checkpoint)


@pytest.mark.parametrize("case", ["manifest", "header", "file"])
def test_giant_declared_sizes_take_no_memory(checkpoint, case):
    if case == "manifest":
        forge(
            checkpoint,
            lambda facts: facts["tensors"]["w"].update(
                shape=[HUGE], pieces=[{"file": FILE, "key": "w", "offsets": [0], "sizes": [HUGE]}]
            ),
        )
    elif case == "header":
        header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}).encode()
        forge_file(checkpoint, FILE, struct.pack("<Q", len(header)) + header)
    else:
        forge(checkpoint, setting("files", FILE, "bytes", value=HUGE))
    tracemalloc.start()
    for reads in (read_all,) if case == "header" else (read_all, stored_tensors):
        with pytest.raises(BadInput):
            reads(checkpoint)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_huge_sparse_file_is_refused_at_once(checkpoint):
    """Declared, sealed and there, as far as its length tells: nobody reads it through."""
    size = 2**43
    try:
        os.truncate(checkpoint.path / FILE, size)
    except OSError:
        pytest.skip("no files of that length here")

    def change(facts):
        facts["files"][FILE]["bytes"] = size
        facts["tensors"]["w"].update(
            shape=[size // 4 - 100], pieces=[{"file": FILE, "key": "w", "offsets": [0], "sizes": [size // 4 - 100]}]
        )

    forge(checkpoint, change)
    began = time.monotonic()
    for reads in (stored_tensors, read_all):
        with pytest.raises(BadInput, match="this machine has memory for"):
            reads(checkpoint)
    assert time.monotonic() - began < 120  # to read it would take hours


@pytest.mark.parametrize("name", [MANIFEST, SEAL, MARK])
def test_small_files_that_are_huge(checkpoint, name):
    with (checkpoint.path / name).open("wb") as file:
        file.truncate(LARGEST_MANIFEST + 1)
    assert "the limit is" in checkpoints(checkpoint.path.parent)[0].trouble


@pytest.mark.parametrize("name", [*FILES, MARK])
def test_links_pipes_and_folders_under_our_names(checkpoint, tmp_path, name):
    path = checkpoint.path / name
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes() if path.exists() else b'{"good": true, "why": ""}')
    for make in (lambda: path.symlink_to(outside), lambda: os.mkfifo(path), path.mkdir):
        path.unlink(missing_ok=True)
        make()
        assert name in checkpoints(tmp_path)[0].trouble
        if name != MARK:
            with pytest.raises(DamagedCheckpoint):
                verify(checkpoint)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_checkpoint_that_is_a_link(checkpoint, tmp_path):
    (tmp_path / "step-00000009").symlink_to(checkpoint.path)
    (tmp_path / "step-00000010").write_text("")
    assert [each.trouble for each in checkpoints(tmp_path)] == ["expected a folder, got a link or a file."] * 2 + [""]


def test_a_file_that_holds_other_tensors_than_the_manifest_says(checkpoint):
    forge(checkpoint, setting("tensors", "w", "pieces", 0, "key", value="other"))
    with pytest.raises(DamagedCheckpoint, match="holds other tensors than the manifest lists"):
        read_all(checkpoint)


def test_an_unknown_dtype_is_named(checkpoint):
    forge(checkpoint, setting("tensors", "w", "dtype", value="F1"))
    with pytest.raises(BadInput, match="'w' has dtype 'F1'; this torch supports BOOL"):
        stored_tensors(checkpoint)


def test_truth_values_that_are_neither(tmp_path):
    tensors = {"w": torch.tensor([True, False])}
    checkpoint = save(tmp_path, tensors=tensors)
    data = (checkpoint.path / FILE).read_bytes()
    forge_file(checkpoint, FILE, data[:-1] + b"\x07")
    with pytest.raises(DamagedCheckpoint, match="neither 0 nor 1"):
        read_into(checkpoint, {"w": torch.zeros(2, dtype=torch.bool)}, None)


def test_many_pieces_are_checked_in_time(checkpoint):
    """Shards of a large mesh are fine; a staircase that takes a cut for each step is given up."""
    side, count = 100, 3000
    mesh = [([row, column], [1, 1]) for row in range(side) for column in range(side)]
    stairs = [([place, place], [count - place, 1]) for place in range(count)]
    stairs += [([place, place + 1], [1, count - place - 1]) for place in range(count - 1)]
    began = time.monotonic()
    for size, boxes, whole in ((side, mesh, True), (count, stairs, False)):
        forge(checkpoint, setting("tensors", "w", "shape", value=[size, size]))
        forge(checkpoint, pieces(*boxes))
        assert sum(rows * columns for _, (rows, columns) in boxes) == size**2
        assert (checkpoints(checkpoint.path.parent)[0].trouble == "") == whole
    assert time.monotonic() - began < 120


# --- marks ---------------------------------------------------------------------------------------------------------


def test_good_and_discredited_last(checkpoint, tmp_path):
    assert mark_good(checkpoint).good
    assert checkpoints(tmp_path)[0] == mark_good(checkpoint)
    bad = mark_bad(checkpoint, "weights are not finite\x1b[2J")
    assert (bad.good, bad.trouble) == (False, r"weights are not finite\x1b[2J")
    assert checkpoints(tmp_path) == [bad]
    with pytest.raises(BadInput, match="cannot be marked as good: weights are not finite"):
        mark_good(bad)
    assert mark_bad(checkpoint, "").trouble


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"good": 1, "why": ""}',
        '{"good": true}',
        '{"good": false, "why": ""}',
        '{"good": true, "why": "x"}',
    ],
)
def test_a_damaged_mark_is_no_good_sign(checkpoint, tmp_path, text):
    (checkpoint.path / MARK).write_text(text)
    (found,) = checkpoints(tmp_path)
    assert not found.good
    assert found.trouble.startswith("mark.json is damaged: ")


def test_the_sums_are_those_of_the_files(checkpoint):
    facts = json.loads((checkpoint.path / MANIFEST).read_text())
    for name, file in facts["files"].items():
        assert file["sha256"] == hashlib.sha256((checkpoint.path / name).read_bytes()).hexdigest()
