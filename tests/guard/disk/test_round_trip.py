"""What is saved is read again bit for bit; what cannot be is refused before anything is written."""

import hashlib
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ampwise.errors import BadInput
from ampwise.guard.disk import writing
from ampwise.guard.disk.catalog import checkpoints, verify
from ampwise.guard.disk.reading import CheckpointReader, StoredTensorInfo
from ampwise.runs import files
from ampwise.runs.tensor_files import read_tensors

from .disk_toys import FILE, read, read_into, read_plain, same, save, stored_tensors, tensors_of_all_dtypes


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = tensors_of_all_dtypes()
    assert len(tensors) >= 90
    checkpoint = save(tmp_path, tensors=tensors)
    found = read(checkpoint, tensors)
    assert [name for name in tensors if not same(found[name], tensors[name])] == []
    assert stored_tensors(checkpoint) == {
        name: StoredTensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    verify(checkpoint)


def test_tensors_larger_than_what_is_read_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("ampwise.runs.tensor_files.CHUNK", 100)
    tensors = {"w": torch.randn(37, 11), "row": torch.randn(1, 300), "flat": torch.randn(299)}
    found = read(save(tmp_path, tensors=tensors), tensors)
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_a_resume_reads_each_file_once(tmp_path, monkeypatch):
    """And in one pass: the checksum is that of the bytes that are used."""
    tensors = {"w": torch.randn(37, 11), "flat": torch.randn(299)}
    checkpoint = save(tmp_path, tensors=tensors)
    opened = []
    really = files.os.open

    def noting(path, *arguments):
        opened.append(Path(path).name)
        return really(path, *arguments)

    monkeypatch.setattr(files.os, "open", noting)
    reader = CheckpointReader(checkpoint)
    reader.stored()
    reader.plain(0)
    reader.read_into({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, None)
    assert sorted(opened) == ["checkpoint.json", "checkpoint.sha256", "plain-00000.json", FILE]


def test_reading_is_in_place_for_parameters_and_views(tmp_path):
    saved = {"w": torch.randn(3, 4), "column": torch.randn(3)}
    weight, table = torch.nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 5)
    where = weight.data_ptr()
    read_into(save(tmp_path, tensors=saved), {"w": weight, "column": table[:, 2]}, None)
    assert weight.data_ptr() == where
    assert weight.requires_grad
    assert torch.equal(weight, saved["w"])
    assert torch.equal(table[:, 2], saved["column"])
    assert int((table != 0).sum()) == 3


def test_the_staged_values_are_written_and_not_the_live_ones(tmp_path):
    staged = {"w": torch.full((2,), 7.0)}
    checkpoint = save(tmp_path, live={"w": torch.zeros(2)}, staged=staged)
    assert same(read(checkpoint, staged)["w"], staged["w"])


def test_plain_data_and_what_is_said_about_it(tmp_path):
    plain = {"rng": [2**63, -1, 0.1], "none": None, "nested": {"é": [True, 1e-320]}}
    checkpoint = save(tmp_path, 12, plain=plain, about={"precision": "bf16", "command": ["train.py"]})
    assert read_plain(checkpoint, 0) == plain
    assert read_plain(checkpoint, 5) == plain  # there was one rank, and it stands in
    (found,) = checkpoints(tmp_path)
    assert found == checkpoint
    assert (found.step, found.number, found.world_size, found.good, found.trouble) == (12, 1, 1, False, "")
    assert found.about == {"precision": "bf16", "command": ["train.py"]}
    assert found.bytes == sum((found.path / name).stat().st_size for name in (FILE, "plain-00000.json"))


def test_a_step_that_is_gone_through_again_has_another_name_and_is_newer(tmp_path):
    names = [save(tmp_path, step).path.name for step in (100, 200, 100, 100)]
    assert names == ["step-00000100", "step-00000200", "step-00000100-2", "step-00000100-3"]
    assert [each.path.name for each in checkpoints(tmp_path)] == names[::-1]
    assert [each.number for each in checkpoints(tmp_path)] == [4, 3, 2, 1]


def test_other_tools_read_it(tmp_path):
    checkpoint = save(tmp_path, tensors={"model.w": torch.ones(2)})
    assert list(read_tensors(checkpoint.path / FILE).tensors) == ["model.w"]
    done = subprocess.run(["sha256sum", "-c", "checkpoint.sha256"], cwd=checkpoint.path, capture_output=True)
    assert done.returncode == 0
    files = json.loads((checkpoint.path / "checkpoint.json").read_text())["files"]
    assert files[FILE]["sha256"] == hashlib.sha256((checkpoint.path / FILE).read_bytes()).hexdigest()
    assert not [path for path in checkpoint.path.iterdir() if b"\x80\x04" in path.read_bytes()[:2]]  # no pickle


def test_alone_in_a_thread_beside_a_process_group_of_others(tmp_path):
    """Without a group nobody is asked, also where there is a default one that others would have to join."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        done = []
        thread = threading.Thread(target=lambda: done.append(save(tmp_path / "checkpoints")))
        thread.start()
        thread.join(120)
        assert not done[0].trouble
    finally:
        dist.destroy_process_group()


# --- refused -------------------------------------------------------------------------------------------------------

W = {"w": torch.zeros(2)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"step": 10**18}, "expected a whole number, 0 or more"),
        ({"live": W, "staged": {}}, "'w' is in only one of live and staged"),
        ({"tensors": {"": torch.zeros(2)}}, "not a valid tensor name"),
        ({"tensors": {"__metadata__": torch.zeros(2)}}, "not a valid tensor name"),
        ({"tensors": {"a\nb": torch.zeros(2)}}, "not a valid tensor name"),
        ({"tensors": {"w": 3.0}}, "'w' is not a tensor"),
        ({"live": W, "staged": {"w": torch.zeros(2).half()}}, "staged as torch.float16 on cpu, expected torch.float32"),
        ({"live": W, "staged": {"w": torch.zeros(3)}}, r"staged with shape \(3,\), expected \(2,\)"),
        (
            {"tensors": {"w": torch.zeros(2, dtype=torch.complex128)}},
            "complex128, which the safetensors format does not support",
        ),
        ({"tensors": {"w": torch.zeros(2).to_sparse()}}, "is not dense"),
        ({"plain": {"x": object()}}, "the plain data cannot be written as JSON"),
        ({"plain": float("nan")}, "the plain data cannot be written as JSON"),
    ],
)
def test_what_has_no_form_is_refused_and_leaves_nothing(tmp_path, options, text):
    with pytest.raises(BadInput, match=text) as raised:
        save(tmp_path, **options)
    assert str(raised.value).startswith("a checkpoint of step ")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_plain_data_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "LARGEST_PLAIN", 10)
    with pytest.raises(BadInput, match="13 bytes as JSON; the limit is 10"):
        save(tmp_path, plain="x" * 11)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": torch.zeros(3, 4), "more": torch.zeros(1)}, "'more' is not in the checkpoint"),
        ({}, "it has 'w', and there is no such tensor here"),
        ({"w": torch.zeros(4, 3)}, r"'w' is torch.float32 of shape \(3, 4\) in the checkpoint, and torch.float32 of"),
        ({"w": torch.zeros(3, 4).half()}, "and torch.float16 of shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, tensors, text):
    with pytest.raises(BadInput, match=text):
        read_into(save(tmp_path), tensors, None)
    assert not any(tensor.any() for tensor in tensors.values())


def test_the_plan_of_many_ranks():
    """Copies are spread over the ranks that have them; what may differ is the first rank's, whatever others have."""

    def piece(name, shape, offsets=None, sizes=None, alike=True):
        return writing.LocalPiece(name, "F32", shape, offsets or (0,) * len(shape), sizes or shape, alike)

    ranks = [
        [
            *(piece(f"copy{number}", (10,)) for number in range(4)),
            piece("rows", (5, 2), (3 * (rank % 2), 0), (3 - rank % 2, 2)),  # each half on two of four ranks
            piece("running_mean", (1 + rank,), alike=False),
            piece("steps", ()),
        ]
        for rank in range(4)
    ]
    planned = writing.plan_pieces(ranks)
    writers = {name: [found.file[8:13] for found in tensor.pieces] for name, tensor in planned.items()}
    assert sorted(writers[f"copy{number}"][0] for number in range(4)) == ["00000", "00001", "00002", "00003"]
    assert [found.key for found in planned["rows"].pieces] == ["rows [0:3, 0:2]", "rows [3:5, 0:2]"]
    assert (writers["running_mean"], planned["running_mean"].shape) == (["00000"], (1,))
    assert writers["steps"] == ["00000"]
    with pytest.raises(BadInput, match="'w' has another dtype or shape on rank 1 than on others"):
        writing.plan_pieces([[piece("w", (2,))], [piece("w", (3,))]])


def test_names_that_are_the_same_in_a_file(tmp_path):
    writer = writing._CheckpointWriter(tmp_path, 1, 0)
    shard = writing.LocalPiece("w", "F32", (4,), (0,), (2,), True)
    other = shard._replace(offsets=(2,))
    full = writing.LocalPiece("w [0:2]", "F32", (2,), (0,), (2,), True)
    with pytest.raises(BadInput, match="two tensors, or pieces of them, have the same name in a file"):
        writer.plan([([shard, other, full], 0)])


def test_a_folder_may_be_named_by_text_and_made(tmp_path):
    assert save(str(tmp_path / "a" / "b")).path == Path(tmp_path / "a" / "b" / "step-00000001")
