"""Several ranks: they write together, read in other numbers, and fail together."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ampwise.guard.disk.catalog import checkpoints, verify
from ampwise.runs.tensor_files import read_tensors

from ...night import by_night

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork")

LOADED = ["ampwise.guard.disk.reading", "ampwise.guard.disk.writing", "torch.distributed.fsdp"]


@pytest.fixture(scope="module")
def ranks(warm):
    """Runs a phase with so many ranks in a folder; what each found."""
    script = Path(__file__).with_name("disk_ranks.py")
    with Path(os.devnull).open("w") as said, warm.asked_by_lines(script, said=said, loaded=LOADED) as ask:
        yield lambda name, world, at: json.loads(ask(json.dumps({"phase": name, "world": world, "folder": str(at)})))


@pytest.mark.parametrize(
    ("writers", "readers"), [(2, (1, 3)), *by_night((2, (2,)), (4, (4, 2)), (3, (2, 1)), (1, (2, 4)))]
)
def test_others_read_what_some_have_written(ranks, tmp_path, writers, readers):
    folder = tmp_path / "checkpoints"
    answers = ranks("write", writers, folder)
    assert [answer.get("error") for answer in answers] == [None] * writers
    assert len({json.dumps(answer) for answer in answers}) == 1  # all were told the same
    (checkpoint,) = checkpoints(folder)
    assert (checkpoint.trouble, checkpoint.world_size) == ("", writers)
    assert answers[0]["bytes"] == checkpoint.bytes
    verify(checkpoint)
    for world in readers:
        found = ranks("read", world, folder)
        assert [answer.get("error") for answer in found] == [None] * world
        assert [answer["wrong"] for answer in found] == [[]] * world
        assert [answer["plain"] for answer in found] == [{"rank": rank % writers} for rank in range(world)]


def test_what_all_have_alike_is_written_once_and_by_all(ranks, tmp_path):
    ranks("write_ddp", 2, tmp_path)
    (checkpoint,) = checkpoints(tmp_path)
    held = [list(read_tensors(checkpoint.path / f"tensors-0000{rank}.safetensors").tensors) for rank in range(2)]
    assert sorted(held[0] + held[1]) == [f"w{place}" for place in range(8)]
    assert [len(names) for names in held] == [4, 4]


def test_numbers_that_all_read_again_are_in_one_file(ranks, tmp_path):
    answers = ranks("write_numbers", 3, tmp_path)
    assert [answer.get("error") for answer in answers] == [None] * 3
    (checkpoint,) = checkpoints(tmp_path)
    held = [list(read_tensors(checkpoint.path / f"tensors-0000{rank}.safetensors").tensors) for rank in range(3)]
    assert [name for names in held[1:] for name in names if name.startswith("step")] == []
    assert sorted(name for names in held for name in names) == sorted([*(f"step{place}" for place in range(8)), "w"])


def test_a_model_that_is_fully_sharded(ranks, tmp_path):
    assert [answer.get("error") or answer["wrong"] for answer in ranks("write_fsdp", 2, tmp_path)] == [[], []]


@pytest.mark.parametrize(
    ("phase", "kind", "text"),
    [
        (
            "write_too_much_on_one",
            "OSError",
            "on rank 1, File too large. Free some disk space, or name another folder.",
        ),
        ("write_unlike_on_one", "BadInput", "on rank 1, 'rows' is staged with shape (1, 4), expected (3, 4)"),
        ("write_object_on_one", "BadInput", "on rank 1, the plain data cannot be written as JSON"),
        ("write_without_a_disk_in_common", "OSError", "all ranks must share a disk"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_the_last_one_whole(ranks, tmp_path, phase, kind, text):
    folder = tmp_path / "checkpoints"
    ranks("write", 2, folder)
    before = checkpoints(folder)
    answers = ranks(phase, 2, folder)
    for answer in answers:
        assert answer["error"].startswith(f"a checkpoint of step 3 cannot be written to {folder}")
        assert text in answer["error"]
        assert kind in answer["kinds"]
    if phase == "write_too_much_on_one":
        assert [answer["errno"] for answer in answers] == [errno.EFBIG] * 2
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    assert checkpoints(folder) == before
    verify(before[0])


def test_a_rank_that_dies_while_it_writes_does_not_leave_the_others_waiting(ranks, tmp_path):
    first, second = ranks("write_and_die", 2, tmp_path)
    assert second is None
    assert "CheckpointNotSaved" in first["kinds"]
    assert "\n" not in first["error"]
    assert checkpoints(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".step")]


def test_what_does_not_fit_on_one_rank_is_read_on_none(ranks, tmp_path):
    ranks("write", 2, tmp_path)
    for answer in ranks("read_unlike_on_one", 2, tmp_path):
        assert "on rank 1, 'buffer' is torch.float32 of shape (2,) in the checkpoint" in answer["error"]
        assert "BadInput" in answer["kinds"]


def test_damage_in_what_one_rank_needs_is_read_on_none(ranks, tmp_path):
    ranks("write", 2, tmp_path)
    path = checkpoints(tmp_path)[0].path / "tensors-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for answer in ranks("read_damaged", 2, tmp_path):
        assert "tensors-00001.safetensors has changed since it was written" in answer["error"]
        assert "DamagedCheckpoint" in answer["kinds"]
