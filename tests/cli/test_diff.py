"""`ampwise diff`: what is printed, written and refused."""

import json
import re

import pytest

from ampwise.cli import main

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

print("loading")


class Opposed(nn.Module):
    def __init__(self, apart):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.two.weight.copy_(self.one.weight + apart * torch.randn(8, 8))
            self.two.bias.copy_(self.one.bias)

    def forward(self, x):
        return self.out(self.one(x) - self.two(x))


def broken(batch=6, apart=1e-3):
    torch.manual_seed(0)
    model, criterion = Opposed(apart), nn.CrossEntropyLoss()
    x, y = torch.randn(batch, 8), torch.randint(2, (batch,))
    return model, (x, y), lambda x, y: criterion(model(x), y)


def healthy(batch=6):
    return broken(batch, apart=0.5)


def seeded(batch=6):
    torch.manual_seed(3)
    return broken(batch)


def drawn(batch=6):
    model, _, loss = broken(batch)
    torch.seed()
    return model, (torch.randn(batch, 8), torch.randint(2, (batch,))), loss


def nothing():
    return None


def fails():
    model, batch, _ = broken()
    return model, batch, lambda x, y: model(x) @ x
"""


@pytest.fixture
def diff(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(maker, *words):
        code = main(["diff", f"train.py:{maker}", "--device", "cpu", *words])
        return code, *capsys.readouterr()

    return run


def test_what_rounding_explains_is_no_finding(diff):
    code, out, err = diff("healthy")
    assert code == 0
    assert out.startswith("bf16 against fp32: rounding explains everything; modules are up to ")
    assert "loading" not in out
    assert "loading" in err
    assert "diff: a (fp32), forward\n" in err
    assert "criterion" in out  # the loss is a module, too


def test_another_run_compares_the_same(diff):
    texts = [diff("healthy", "--no-floor", "-q")[1] for _ in range(2)]
    assert texts[0] == texts[1]


def test_what_it_does_not_explain_is_named_with_its_line(diff):
    code, out, err = diff("broken", "-q")
    assert code == 1
    assert "rounding does not explain the code of `Opposed` before `out`" in out
    assert re.search(r"--> .*train\.py:18 Opposed", out)
    assert "diff: " not in err


def test_all_rows_and_operations(diff):
    code, out, _ = diff("broken", "-q", "-v", "--ops", "--modules", "o*")
    assert code == 1
    assert "Modules, in the order of calls" in out
    assert re.findall(r"^  (\w+) +Linear", out, re.MULTILINE) == ["one", "out"]
    assert "Operations, in their order" in out
    assert "aten.addmm.default" in out


def test_json_is_the_whole_result(diff):
    code, out, _ = diff("broken", "--json", "--b", "mxfp8", "--no-floor", "--batch", "3")
    data = json.loads(out)
    assert code == 1
    assert data["name"] == "train.py:broken"
    assert (data["a"]["label"], data["b"]["label"]) == ("fp32", "mxfp8_e4m3")
    assert data["modules"][0]["outputs"][0]["shape"] == [3, 2]
    assert data["noise_floor"]["largest"] is None
    assert data["findings"][0]["code"] == "AMP530"


def test_a_page_is_written_and_not_over_anything_else(diff, tmp_path):
    code, out, _ = diff("healthy", "-q", "-o", "page.html")
    assert code == 0
    assert out.endswith("Wrote page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert diff("healthy", "-q", "-o", "page.html")[0] == 0  # an earlier page of ours
    (tmp_path / "notes.html").write_text("mine")
    assert diff("healthy", "-q", "-o", "notes.html")[2].startswith(
        "ampwise: error: -o notes.html: exists and is not an ampwise page. Use -f to overwrite it"
    )
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert diff("healthy", "-q", "-o", "notes.html", "-f")[0] == 0
    assert "mine" not in (tmp_path / "notes.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["healthy", "--b", "bf61"], "unknown precision 'bf61'. Did you mean "),
        (["healthy", "--b", "tf32"], "diff: tf32: "),
        (["healthy", "--a", "bf16,fast"], "unknown option in --a bf16,fast: 'fast'"),
        (["healthy", "--modules", "layers.*"], "unknown module 'layers.*'."),
        (["healthy", "-o", "."], "-o .: is a folder. Give a file, such as page.html."),
        (["healthy", "-o", "no/page.html"], "-o no/page.html: there is no folder no."),
        (["nothing"], "train.py:nothing: it returned None; expected a function that returns the model"),
        (["none"], "train.py:none: train.py has no function 'none'."),
        (["fails"], "diff: fp32: the step failed: RuntimeError: "),
    ],
)
def test_what_cannot_be_done_is_a_line(diff, words, told):
    code, out, err = diff(*words)
    assert (code, out) == (2, "")
    assert f"ampwise: error: {told}" in err


def test_help_has_the_sides_and_the_json(capsys):
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    out = capsys.readouterr().out
    for words in (
        "attention=NAME                 math, flash, efficient or cudnn",
        "ampwise diff train.py:make --b mxfp8",
        "ampwise schema diff",
    ):
        assert words in out


def test_remedies_are_verified_on_other_batches_of_the_function(diff):
    code, out, _ = diff("drawn", "--remedies", "2", "--json")
    remedies = json.loads(out)["remedies"]
    assert code == 1
    assert "Policy('fp16')" in [remedy["policy"] for remedy in remedies]
    assert {remedy["batches"] for remedy in remedies} == {2}
    code, _, err = diff("seeded", "--remedies", "2")
    assert code == 2
    assert "a held-back batch is the compared one" in err
    code, out, _ = diff("healthy", "--a", "fp32", "--b", "fp32,batch=2", "--json")
    assert json.loads(out)["tokens"]["rms"] < 1e-6
