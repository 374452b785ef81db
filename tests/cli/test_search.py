"""``ampwise search``: what it prints, writes and returns."""

import json

import pytest

pytest.importorskip("torch")

import torch

from ampwise.cli import main
from ampwise.errors import BadInput
from ampwise.tune.search.result import SearchResult

TRAIN = """
import torch
from torch import nn
import torch.nn.functional as F

def make(layers=3):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, 4))
    print("what the user prints")
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)

def as_keywords():
    model, (x, y), loss = make()
    return model, {"x": x, "y": y}, loss

def always_the_same():
    torch.manual_seed(1)
    return make()

def slow():
    model, batch, loss = make()
    calls = []
    def stops(x, y):
        calls.append(1)
        if len(calls) == 24 and not __import__("os").path.exists("again"):
            raise KeyboardInterrupt
        return loss(x, y)
    return model, batch, stops
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train_searched.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    numbers, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_rng_state(numbers)
    torch.set_num_threads(threads)


def run(capsys, *words):
    code = main(["search", *words])
    return code, *capsys.readouterr()


def test_it_says_what_was_found_and_writes_it(capsys, folder):
    code, out, err = run(capsys, "train_searched.py:make", "--tolerance", "0.5", "--gpu", "h200", "-o", "policy.json")
    assert code == 0
    assert out.startswith("train_searched.py:make: 4 in e4m3, of 4 modules with matmuls; error 0.0")
    assert "by the peaks of h200 (datasheet)" in out
    assert out.endswith("Wrote policy.json; load it with ampwise.SearchResult.load('policy.json')\n")
    assert "what the user prints" not in out
    assert "ampwise: 4 in e4m3: error" in err
    assert "s left" in err
    found = SearchResult.load("policy.json")
    assert (found.batches, found.verified.batches) == (4, 1)
    assert set(found.modules.values()) == {"e4m3"}
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["policy.json", "train_searched.py"]


def test_json_is_all_of_it(capsys):
    words = (
        "train_searched:as_keywords",
        "--tolerance",
        "0.5",
        "--formats",
        "bf16,fp32",
        "--batches",
        "2",
        "--json",
        "-q",
    )
    code, out, err = run(capsys, *words)
    assert code == 0
    data = json.loads(out)
    assert data["modules"] == {"0": "bf16", "1": "bf16", "2": "bf16", "3": "bf16"}
    assert data["policy"]["base"] == "bf16"
    assert SearchResult.from_dict(data).as_dict()["gain"] == data["gain"]
    assert err == "what the user prints\n" * 2


def test_where_nothing_can_be_narrower_it_is_1(capsys):
    code, out, _ = run(capsys, "train_searched:make", "--tolerance", "1e-6", "-q", "--batches", "1")
    assert code == 1
    assert "at a tolerance of 1e-06 only FP32 everywhere passes (tried: e4m3, bf16)" in out


def test_batches_that_do_not_differ_verify_nothing(capsys):
    code, out, _ = run(capsys, "train_searched:always_the_same", "--tolerance", "0.5", "-q")
    assert code == 0
    assert "There was only one batch, so nothing was held back for verification." in out


def test_only_some_modules(capsys):
    code, out, _ = run(
        capsys, "train_searched:make", "--tolerance", "0.5", "-q", "--modules", "1", "--modules", "3", "--json"
    )
    assert code == 0
    assert json.loads(out)["modules"] == {"1": "e4m3", "3": "e4m3", "0": "fp32", "2": "fp32"}


def test_ctrl_c_says_how_to_go_on_and_that_goes_on(capsys, folder):
    words = ("train_searched:slow", "--formats", "e4m3,fp32", "--tolerance", "0.001", "-o", "policy.json", "-q")
    code, out, err = run(capsys, *words)
    assert (code, out) == (130, "")
    command = "ampwise search train_searched:slow --formats e4m3,fp32 --tolerance 0.001 -o policy.json -q --resume"
    assert err.endswith(f"ampwise: interrupted; resume with: {command}\n")
    part = folder / "policy.json.part"
    kept = len(json.loads(part.read_text())["trials"])
    assert kept > 0
    (folder / "again").touch()
    code, out, _ = run(capsys, *command.split()[2:])
    assert code in (0, 1)
    assert f"{kept} trials came from an earlier run." in out
    assert not part.exists()


def test_without_resume_it_begins_anew(capsys, folder):
    words = ("train_searched:make", "--tolerance", "0.5", "-q", "--batches", "1")
    (folder / "ampwise-search.part").write_text("of something else")
    code, _, err = run(capsys, *words)
    assert code == 2
    assert (
        "ampwise-search.part has the trials of an interrupted search. Continue with --resume, or start over with -f."
        in err
    )
    assert run(capsys, *words, "-f")[0] == 0
    assert not (folder / "ampwise-search.part").exists()
    (folder / "ampwise-search.part").write_text("of something else")
    code, _, err = run(capsys, "train_searched:make", "--tolerance", "0.5", "-q", "--resume")
    assert code == 2
    assert "search(resume='ampwise-search.part'): cannot resume from it" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train_searched:make", "--batches", "17"], "--batches 17: expected 1 to 16"),
        (["train_searched:make", "-o", ".", "-f"], "search -o .: cannot write there"),
        (["train_searched:make", "-o", "nowhere/policy.json"], "search -o nowhere/policy.json: cannot write"),
        (["train_searched:make", "--formats", "e4m3"], "--formats e4m3: expected fp32"),
        (["train_searched:make", "--formats", "e4m4,fp32"], "unknown format 'e4m4'"),
        (["train_searched:make", "--modules", "decoder"], "unknown module 'decoder'"),
        (["train_searched:make", "--gpu", "h2000"], "unknown device 'h2000'"),
        (["train_searched:make", "--tolerance", "0"], "--tolerance 0: expected a number above 0"),
        (["train_searched:make", "--device", "tpu"], "unknown device 'tpu'"),
        (
            ["train_searched:make", "-o", "train_searched.py"],
            "the file exists. Name another one, or overwrite it with -f",
        ),
        (["train_searched:nothing"], "has no function 'nothing'"),
        (["train_searched"], "'train_searched': expected train.py:make"),
    ],
)
def test_mistakes_are_a_line_and_2(capsys, words, said):
    code, out, err = run(capsys, *words, "-q")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("ampwise: error: ")
    assert said in err


def test_what_cannot_be_written_in_the_end_is_printed_all_the_same(capsys, folder, monkeypatch):
    def full(self, path):
        raise BadInput("the disk is full")

    monkeypatch.setattr(SearchResult, "save", full)
    words = ("train_searched:make", "--tolerance", "0.5", "-q", "--batches", "1", "-o", "policy.json")
    code, out, err = run(capsys, *words)
    assert code == 2
    assert "4 in e4m3, of 4 modules" in out
    assert "the disk is full" in err


def test_force_writes_over_a_file(capsys, folder):
    (folder / "policy.json").write_text("old")
    words = ("train_searched:make", "--tolerance", "0.5", "-q", "--batches", "1", "-o", "policy.json")
    assert run(capsys, *words)[0] == 2
    assert run(capsys, *words, "-f")[0] == 0
    assert SearchResult.load("policy.json").narrower
