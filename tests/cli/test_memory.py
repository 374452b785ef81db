"""`ampwise memory`, as it is read and as it is parsed."""

from __future__ import annotations

import json

import pytest

from ampwise.cli import main

pytest.importorskip("torch")
pytest.importorskip("rich")

SIZES = ["--layers", "1", "--hidden", "128", "--vocab", "512", "--seq", "64"]
SCRIPT = """
import torch
from torch import nn

print("made")

def make(batch=4):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.zeros(batch, 64), lambda x: model(x).mean()

def needs(width):
    return None

def asks():
    model = nn.Linear(4, 4)
    return model, torch.zeros(2, 4), lambda x: model(x).sum() if x.sum().item() else None
"""


@pytest.fixture(autouse=True)
def plain_page(monkeypatch):
    """The same page whatever terminal and GPU the tests run with."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("ampwise.tune.memory.estimate.local_memory", lambda: None)


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_table_with_a_column_for_each_precision(capsys):
    assert main(["memory", *SIZES, "--batch", "2,4", "-q"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("a decoder transformer: ")
    assert [line.split()[2:] for line in lines if line.startswith("batch ")] == [
        ["MiB", "fp32", "tf32", "fp16", "bf16", "basis"]
    ] * 2
    rows = {line.split("  ")[0]: line.split() for line in lines if line}
    assert rows["parameters"][-1] == rows["peak"][-1] == "derived"
    assert rows["CUDA context"][-2:] == ["600.0", "allowance"]
    assert rows["fits a GPU of"][-1] == "datasheet"
    assert "Assumed model" in out
    assert err == ""


def test_json_for_machines(capsys):
    assert main(["memory", *SIZES, "--precision", "fp32, bf16", "--json", "--gpu", "h200"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert [each["precision"] for each in data["estimates"]] == ["fp32", "bf16"]
    assert data["gpu"]["name"] == "H200 SXM 141GB"
    assert data["largest_batch"]["bf16"] > data["largest_batch"]["fp32"] > 1
    assert data["shape"]["layers"] == 1
    assert err.startswith("ampwise: counting fp32\n")  # how far it is, where nobody parses it


def test_a_function_of_a_file(train, capsys):
    assert main(["memory", f"{train}:make", "--batch", "16", "--optimizer", "sgd", "--precision", "fp32", "-q"]) == 0
    out, _ = capsys.readouterr()
    assert "parameters; sgd" in out
    assert "batch 16" in out
    assert "made" not in out  # what the script prints is not what was asked for


def test_a_gpu_that_it_does_not_fit_is_exit_code_1(capsys):
    words = ["memory", "--layers", "1", "--hidden", "24576", "--seq", "8", "--vocab", "64", "-q"]
    assert main([*words, "--precision", "bf16", "--gpu", "rtx4090"]) == 1
    out, _ = capsys.readouterr()
    assert "It does not fit: bf16 with a batch of 1." in out
    assert "The largest batch that fits: none in bf16." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no model given: name your function, train.py:make (`ampwise init train.py` writes one), or give sizes: "),
        (["--params", "many"], "--params many: expected a number of parameters, such as 124M, 7B or 1.3e9."),
        (
            [*SIZES, "--arch", "cnn"],
            "--arch cnn: sizes describe a decoder transformer only. For another model name your",
        ),
        ([*SIZES, "--batch", "two"], "--batch two: expected whole numbers of rows, such as 8 or 8,16,32."),
        ([*SIZES, "--batch", "0"], "--batch 0: expected whole numbers of rows"),
        ([*SIZES, "--fsdp", "8", "--ddp"], "--fsdp and --ddp exclude each other: give one of them."),
        ([*SIZES, "--gpu", "h300"], "unknown device 'h300'."),
        ([*SIZES, "--optimizer", "adamv"], "unknown optimizer 'adamv'."),
        ([*SIZES, "--precision", "fp8"], "no linear layer of this model can run in FP8"),
        (
            [*SIZES, "--precision", "bf16-pure,kahn"],
            "unknown precision 'kahn'. Did you mean kahan? --precision takes fp32, tf32, fp16, bf16, fp8, bf16-pure, ",
        ),
        ([*SIZES, "--precision", "bf16,kahan"], "'kahan' is an option of bf16-pure: bf16-pure,kahan."),
        ([*SIZES, "--heads", "3"], "the hidden size is not divisible by the number of heads."),
        (["{train}:nonesuch"], "has no function 'nonesuch'."),
        (["{train}:needs"], "it must be callable without arguments, but requires width"),
        (["{train}:asks"], "the step reads the values of a tensor (.item()) (train.py:16)"),
        (["{train}:make", "--hidden", "64"], "a model from a function has its own sizes; leave out --hidden."),
        (["{train}:make", "--checkpointing"], "no repeated blocks were found in this model"),
    ],
)
def test_what_cannot_be_counted_is_exit_code_2(words, said, train, capsys):
    assert main(["memory", "-q", *(word.format(train=train) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("ampwise: error: ") or "expected a function" in err
    assert said in err


def test_names_are_no_markup_and_no_pictures(tmp_path, capsys):
    path = tmp_path / "hf.py"
    path.write_text(SCRIPT.replace("def make", "def llama"))
    assert main(["memory", f"{path}:llama", "--precision", "fp32", "-q"]) == 0
    assert f"{path}:llama: " in capsys.readouterr().out
