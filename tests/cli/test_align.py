"""`ampwise align`: the table, the JSON, the exit codes, and what is said about bad input."""

import json
import textwrap

import pytest

torch = pytest.importorskip("torch")

from ampwise.cli import main  # noqa: E402

TRAIN = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    def odd(batch=4096):
        print("hello from the user's code")
        model = nn.Sequential(nn.Linear(1024, 4093), nn.GELU(), nn.Linear(4093, 1024))
        return model, torch.randn(batch, 1024), lambda x: model(x).square().mean()

    def fine(batch=4096):
        model = nn.Linear(1024, 1024)
        return model, torch.randn(batch, 1024), lambda x: model(x).square().mean()

    def needs(width):
        pass

    def wrong():
        return 5
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    (tmp_path / "align_me.py").write_text(textwrap.dedent(TRAIN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    return lambda name, *options: main(["align", f"align_me.py:{name}", "--device", "cpu", *options])


def test_a_table_and_what_to_do(train, capsys):
    assert train("odd") == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("align_me.py:odd in bf16, 4096 rows; costs are derived, not measured: ")
    assert lines[2] == "layer  product M×N×K   off → better         cost"
    assert lines[3] == "0      4096×4093×1024  outputs 4093 → 4096  40.0% of the work" or "60.0%" in lines[3]
    assert lines[-2] in ("0, 2: ampwise.pad_(model)", "2, 0: ampwise.pad_(model)")
    assert lines[-1] == "worth fixing: 2 of 2 layers (ampwise explain AMP503)"
    assert err == "ampwise: running a step without memory\nhello from the user's code\n"


def test_nothing_to_fix(train, capsys):
    assert train("fine", "-q") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "every matmul is aligned (layers checked: 1)"
    assert err == ""


def test_json(train, capsys):
    assert train("odd", "--json", "--quiet", "--batch", "512") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 512
    assert found["step_ms"] is None
    assert {layer["name"]: layer["worth_fixing"] for layer in found["layers"]} == {"0": True, "2": True}
    assert [step["names"] for step in found["padding"]["padded"]] == [["0"], ["2"]]
    assert {finding["code"] for finding in found["findings"]} == {"AMP503"}


def test_on_a_narrow_terminal_nothing_is_cut(train, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert train("fine", "-q", "--to", "2048") == 1
    assert "…" not in capsys.readouterr().out


def test_other_multiples_and_precisions(train, capsys):
    assert train("fine", "-q", "--to", "2048") == 1
    assert "outputs 1024 → 2048, inputs 1024 → 2048" in capsys.readouterr().out
    assert train("odd", "-q", "--precision", "fp8", "--gpu", "h100-sxm") == 1
    out = capsys.readouterr().out
    assert "is not here" in out
    assert "ampwise.pad_(model, precision='fp8')" in out
    assert "AMP510" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["odd", "--precision", "fp61"], "unknown precision 'fp61'. Did you mean fp16"),
        (["odd", "--to", "7"], "to=7 is not a multiple of 8, which bf16 needs; use 8, 16, 64 or 128."),
        (["odd", "--gpu", "h1000"], "unknown device 'h1000'."),
        (["odd", "--device", "tpu"], "unknown device 'tpu'"),
        (["nothing"], "align_me.py:nothing: align_me.py has no function 'nothing'."),
        (
            ["needs"],
            "align_me.py:needs: it must be callable without arguments, but requires width: give them defaults.",
        ),
        (["wrong"], "align_me.py:wrong: it returned an int; expected a function that returns the model"),
    ],
)
def test_bad_input_is_one_line_and_two(train, capsys, words, said):
    assert train(*words) == 2
    error = capsys.readouterr().err
    assert f"ampwise: error: {said}" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_was_asked_for_and_there_is_none(train, capsys):
    assert train("odd", "--device", "cuda") == 2
    assert capsys.readouterr().err == (
        "ampwise: error: device 'cuda': torch sees no CUDA device. Omit it to derive the costs on the CPU.\n"
    )
