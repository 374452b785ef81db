"""What earlier versions left on disk is still read; and what later ones will leave is refused in words that help.

Each archive in fixtures/ was written by the version it is named after, with make_fixtures.py, and stays as it is.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest
import torch

import ampwise
from ampwise import BadInput, Engine, Guard, Policy, Run, SearchResult
from ampwise.cli import main
from ampwise.guard.disk import manifest as checkpoint_layout
from ampwise.guard.disk.catalog import checkpoints, verify
from ampwise.runs import layout as record_layout
from ampwise.trace.capsule import capsule_files as capsule_layout
from ampwise.tune.search import result as found_form

from ..for_each import for_each

ARCHIVES = sorted((Path(__file__).parent / "fixtures").glob("*.zip"))
BUILD = """
import torch

def make():
    model = torch.nn.Linear(4, 2)
    return model, lambda x: (model(x) * 1e38 * 1e38).sum()
"""


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def old(request, tmp_path):
    """What a version left, unpacked."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


def capsule_of(old):
    return old / "capsule" / "step-000001"


def checkpoint_of(old):
    return old / "checkpoint" / "step-00000003"


def test_a_record(old, capsys):
    run = Run.read(old / "record")
    assert (run.status, run.trouble, run.findings_known) == ("finished", [], True)
    assert [seen.finding.rule.code for seen in run.findings][:1] == ["AMP101"]
    assert [bucket.last for bucket in run.rows()] == [1, 2, 3, 4, 5, 6]
    assert set(run.total_layers()) == {"weight", "bias"}
    assert main(["report", str(old / "record"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0
    assert main(["report", str(old / "record"), "-o", str(old / "page.html")]) == 0


def test_a_checkpoint_is_gone_on_from(old):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine = Engine(model, optimizer, "bf16", scheduler=schedule)
    (found,) = checkpoints(old / "checkpoint")
    verify(found)
    with Guard(engine, old / "checkpoint", signals=()) as guard:
        batches = list(guard.batches([torch.full((3, 4), float(turn)) for turn in range(5)]))
        assert guard.last_checkpoint.step == 3
    assert (engine.applied_steps, schedule.last_epoch) == (3, 3)
    assert engine.lr == pytest.approx(0.01)
    assert [batch[0, 0].item() for batch in batches] == [3.0, 4.0]
    assert all(state["step"].item() == 3 for state in optimizer.state.values())
    assert torch.equal(model.weight, weight_of(old))


def weight_of(old):
    """Read by hand, after the specification of safetensors: a length, a header, then the bytes."""
    data = (checkpoint_of(old) / "tensors-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    (entry,) = (entry for name, entry in header.items() if re.match(r"model\W(\d+\W)?weight", name))
    begin, end = entry["data_offsets"]
    return torch.frombuffer(bytearray(data[8 + length :][begin:end]), dtype=torch.float32).reshape(entry["shape"])


def test_a_capsule_is_replayed(old, capsys, monkeypatch):
    monkeypatch.chdir(old)
    (old / "net.py").write_text(BUILD)
    assert main(["replay", str(capsule_of(old)), "net.py:make", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in told] == ["AMP905"]


def test_a_policy(old):
    made = Policy.from_dict(json.loads((old / "policy" / "policy.json").read_text()))
    assert made == Policy("bf16").keep("fp32", "*.router", "lm_head")


def test_what_a_search_found(old):
    found = SearchResult.load(old / "search" / "found.json")
    assert set(found.modules) == {"0", "1"}
    assert found.tolerance == 0.1


@for_each(
    ("present", "file", "key"),
    [
        (record_layout.VERSION, "record/manifest.json", "version"),
        (capsule_layout.VERSION, "capsule/step-000001/capsule.json", "version"),
        (checkpoint_layout.VERSION, "checkpoint/step-00000003/checkpoint.json", "version"),
        (Policy("fp32").as_dict()["version"], "policy/policy.json", "version"),
        (found_form.VERSION, "search/found.json", "version"),
    ],
)
def test_the_present_version_of_every_form_is_remembered(present, file, key):
    """Whoever raises one makes an archive of it, before it changes again."""
    kept = []
    for path in ARCHIVES:
        with zipfile.ZipFile(path) as archive:
            kept.append(json.loads(archive.read(file))[key])
    assert present in kept


# --- of a later version


def later(path, seal=None):
    text = path.read_text()
    changed = re.sub(r'"version": ?\d+', '"version": 99', text, count=1)
    assert changed != text
    path.write_text(changed)
    if seal is not None:
        (path.parent / seal).write_text(f"{hashlib.sha256(changed.encode()).hexdigest()}  {path.name}\n")


def test_a_later_record(old):
    later(old / "record" / "manifest.json")
    with pytest.raises(
        BadInput, match=r"is a record of version 99, written by ampwise 0\.1\.0; this is ampwise .*, which"
    ):
        Run.read(old / "record")


def test_a_later_checkpoint(old, capsys):
    later(checkpoint_of(old) / "checkpoint.json", "checkpoint.sha256")
    (found,) = checkpoints(old / "checkpoint")
    assert found.trouble == (
        "checkpoint.json has version '99'; this ampwise reads version 3. Use the version of ampwise that wrote it."
    )
    assert main(["checkpoints", str(old / "checkpoint")]) == 1
    assert "version '99'" in capsys.readouterr().out


def test_a_later_capsule(old, capsys):
    later(capsule_of(old) / "capsule.json", "capsule.sha256")
    assert main(["replay", str(capsule_of(old))]) == 2
    said = "is a capsule of version '99'; this ampwise reads version 2. Use the version of ampwise that wrote it."
    assert said in capsys.readouterr().err


def test_a_later_policy():
    with pytest.raises(BadInput, match="expected version 1, got 99"):
        Policy.from_dict(Policy("fp32").as_dict() | {"version": 99})


def test_a_later_search(old):
    later(old / "search" / "found.json")
    with pytest.raises(BadInput, match="not a file of ampwise search -o: it is not marked as"):
        SearchResult.load(old / "search" / "found.json")


def test_a_later_state_of_an_engine():
    model = torch.nn.Linear(4, 2)
    engine = ampwise.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with pytest.raises(BadInput, match="expected version 2, got version 99"):
        engine.load_state_dict(engine.state_dict() | {"version": 99})
