"""Small files that ask for much memory: refused before it is given."""

import hashlib
import json
import struct
import tracemalloc
from contextlib import contextmanager

import pytest

from ampwise import BadInput
from ampwise.cli import main
from ampwise.guard.disk.catalog import checkpoints
from ampwise.guard.disk.manifest import CheckpointManifest, DamagedCheckpoint
from ampwise.runs.reader import Run
from ampwise.runs.tensor_files import read_tensors
from ampwise.trace.capsule import read

from .test_forged import sealed, train

MANY = '{"":0},' * 1_500_000  # 10 MB, of which Python makes 360 MB
MOST = "lists and objects; the limit is 1,000,000"


@contextmanager
def little_memory(most=100_000_000):
    """That the block takes no more bytes at any time, beside what there was before."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.half_by_day
@pytest.mark.parametrize("key", ["exp_avg", "step"])
@pytest.mark.parametrize(
    "form",
    [
        {"dict": {"dtype": "float32", "shape": [2**44], "on_device": True}},
        {"dict": {"dtype": "float32", "shape": [2**70], "on_device": True}},
        {"dict": {"dtype": "complex128", "shape": None, "on_device": True}},
    ],
)
def test_a_state_of_an_optimizer_that_the_files_do_not_have(tmp_path, key, form):
    """By a number in a file of some kilobytes, terabytes would be asked for, before the manifest is compared."""
    train(tmp_path, 2)
    (checkpoint,) = checkpoints(tmp_path)
    plain = checkpoint.path / "plain-00000.json"
    state = json.loads(plain.read_text())
    named = state["dict"]["optimizers"][0]["dict"]["state"]["dict"]
    next(iter(named.values()))["dict"][key] = {"dict": {"tensor": form}}
    plain.write_text(json.dumps(state))
    manifest = json.loads((checkpoint.path / "checkpoint.json").read_text())
    digest = hashlib.sha256(plain.read_bytes()).hexdigest()
    manifest["files"][plain.name] = {"bytes": plain.stat().st_size, "sha256": digest}
    sealed(checkpoint.path / "checkpoint.json", checkpoint.path / "checkpoint.sha256", json.dumps(manifest))
    with pytest.raises(BadInput, match="is stored with another shape or dtype"):
        train(tmp_path, 3)


def test_a_capsule_of_many_lists(tmp_path):
    data = f'{{"format": "ampwise-capsule", "version": 2, "args": [{MANY}0]}}'
    sealed(tmp_path / "capsule.json", tmp_path / "capsule.sha256", data)
    with little_memory(), pytest.raises(BadInput, match=MOST):
        read(tmp_path)


def test_a_header_of_tensors_of_many_lists(tmp_path):
    header = f'{{"w": [{MANY}0]}}'.encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with little_memory(), pytest.raises(BadInput, match=MOST):
        read_tensors(tmp_path / "w.safetensors")


def test_a_manifest_of_many_lists_or_ranks():
    many = f'{{"format": "ampwise-checkpoint", "version": 3, "about": [{MANY * 3}0]}}'.encode()
    ranks = {"step": 1, "number": 1, "saved": 1, "world_size": 100_000, "about": {}, "files": {}, "tensors": {}}
    few = json.dumps({"format": "ampwise-checkpoint", "version": 3, **ranks}).encode()
    with little_memory(1_000_000):
        with pytest.raises(DamagedCheckpoint, match="lists and objects; the limit is 3,000,000"):
            CheckpointManifest.parse(many)
        with pytest.raises(DamagedCheckpoint, match="does not name two files for each of 100000 ranks"):
            CheckpointManifest.parse(few)


@pytest.mark.nightly
def test_a_record_of_many_lists(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text('{"format": "ampwise-run", "version": 1}')
    (tmp_path / "findings.json").write_text(f'{{"findings": [{MANY}0], "rules": {{}}}}')
    (tmp_path / "steps.jsonl").write_text(f'{{"s":1,"t":0}}\n{{"s":[{MANY}0]}}\n')
    wide = ",".join(["1"] * 100_000)  # each of which would be a binade of a hundred bytes
    lines = [f"[{MANY}0]", f"[0,0,0,1.0,1.0,1.0,0,[{wide}]]"]
    head = '{"s":[1,1],"k":1,"o":0,"g":1.0,"layers":{"a":'
    (tmp_path / "layers.jsonl").write_text("".join(f"{head}{line}}}}}\n" for line in lines))
    with little_memory():
        run = Run.read(tmp_path)
    assert len(run.steps) == 1
    assert not run.layers
    assert f"findings.json cannot be read: it has 1,500,003 {MOST}." in run.trouble
    assert "layers.jsonl: 2 of 2 lines cannot be read and were ignored; the first is line 1." in run.trouble
    assert main(["report", str(tmp_path)]) == 0
