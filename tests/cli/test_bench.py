"""`ampwise bench`: what is printed, written and refused."""

import json

import pytest

from ampwise.cli import main

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16

SCRIPT = """
import torch
import torch.nn.functional as F

print("loading")


def make(batch=4):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    x, y = torch.randn(batch, 8), torch.randint(2, (batch,))
    return model, (x, y), lambda x, y: F.cross_entropy(model(x).float(), y)


def off():
    model, batch, loss_fn = make()
    return model, batch, lambda x, y: loss_fn(x, y) * (2 if torch.is_autocast_enabled("cpu") else 1)


def infinite():
    model, batch, loss_fn = make()
    return model, batch, lambda x, y: loss_fn(x, y) * float("inf")


def frozen():
    model, batch, loss_fn = make()
    return model.requires_grad_(False), batch, loss_fn


def overflows():
    model, batch, loss_fn = make()
    return model, batch, lambda x, y: loss_fn(x, y) * (float("inf") if torch.is_autocast_enabled("cpu") else 1)


def needs(width):
    return make()


def nothing():
    return None
"""
FAST = ("--device", "cpu", "--rounds", "2", "--steps", "1")


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(maker="train.py:make", *words, fast=FAST):
        code = main(["bench", maker, *fast, *words])
        return code, *capsys.readouterr()

    return run


def test_a_table_with_the_verdict_first(compare):
    code, out, err = compare("train.py:make", "--precisions", "fp32,bf16")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("train.py:make on ")
    assert lines[0].endswith(", a batch of 4, 2 rounds")
    assert any(words in lines[1] for words in ("stay", "optional", "use", "definitely"))
    assert lines[3].split() == ["precision", "step", "×fp32", "samples/s", "loss", "verdict"]
    assert [line.split()[0] for line in lines[4:6]] == ["fp32", "bf16"]
    assert "loading" not in out, "what the user's code prints is not what was asked for"
    assert "loading" in err
    assert "ampwise: comparing losses (1/" in err
    assert "ampwise: measuring (" in err


def test_quiet_says_nothing_but_the_answer(compare):
    _, _, err = compare("train.py:make", "--precisions", "bf16", "-q")
    assert "ampwise:" not in err


def test_json(compare):
    code, out, _ = compare("train.py:make", "--precisions", "fp16", "--batch", "6", "--keep", "fp32=*", "--json")
    data = json.loads(out)
    asked = "--device cpu --precisions fp16 --batch 6 --rounds 2 --steps 1 --keep 'fp32=*'"
    assert data["command"] == f"ampwise bench train.py:make {asked}"
    assert code == 0
    assert [row["label"] for row in data["rows"]] == ["fp32", "fp16"]
    assert (data["batch"], data["name"], data["device"]) == (6, "train.py:make", "cpu")
    assert data["basis"]["step_s"] == "measured here"


def test_what_computes_something_else_is_exit_code_1(compare):
    code, out, _ = compare("train.py:off", "--precisions", "bf16", "-q")
    assert code == 1
    assert "AMP520 not-the-same-loss: not the same computation: the loss is" in out
    same = "ampwise bench train.py:off --device cpu --rounds 2 --steps 1"
    assert f"  try: {same} --precisions bf16 --keep fp32=PATTERN" in out


def test_a_loss_that_json_has_no_number_for(compare):
    code, out, _ = compare("train.py:overflows", "--precisions", "bf16", "--json", "-q")
    row = json.loads(out)["rows"][1]
    assert code == 1
    assert (row["loss"]["loss"], row["loss"]["same"], row["problem"]) == (
        "Infinity",
        False,
        "not finite: the loss is inf",
    )


def test_a_row_that_the_device_lacks_says_so(compare):
    code, out, _ = compare("train.py:make", "--precisions", "tf32,bf16", "-q")
    assert code == 0
    assert "tf32: not run: " in out
    assert "has no TF32" in out


def test_kept_modules_are_named(compare):
    code, out, _ = compare("train.py:make", "--precisions", "bf16", "--keep", "fp32=2", "--clip", "none", "-q")
    assert code == 0
    assert "16-bit rows keep in FP32: 2." in out


def test_a_page_is_written_and_written_over(compare, tmp_path):
    words = ("--precisions", "bf16", "-q", "-o", "page.html")
    code, out, _ = compare("train.py:make", *words)
    assert code == 0
    assert out.endswith("\nWrote page.html\n")
    page = (tmp_path / "page.html").read_text()
    assert '<meta name="generator" content="ampwise report">' in page
    assert compare("train.py:make", *words)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train:missing",), "train.py has no function 'missing'"),
        (("train.py:needs",), "it must be callable without arguments, but requires width"),
        (("train.py:infinite",), "train.py:infinite: FP32's loss is inf before any comparison"),
        (("train.py:frozen",), "train.py:frozen: no parameter has requires_grad=True"),
        (("train.py:nothing",), "it returned None; expected a function that returns the model"),
        (("train",), "expected train.py:make or train:make"),
        (("nowhere:make",), "nowhere"),
        (("train.py:make", "--precisions", "fp8"), "so fp32 has no counterpart: cpu has no FP8"),
        (("train.py:make", "--precisions", "bf61"), "unknown precision 'bf61'. Did you mean bf16"),
        (("train.py:make", "--precisions", ""), "unknown precision ''"),
        (("train.py:make", "--clip", "-1"), "--clip -1: expected a norm above zero, or none."),
        (("train.py:make", "--clip", "nan"), "--clip nan: expected a norm above zero, or none."),
        (("train.py:make", "--keep", "head"), "--keep head: expected fp32=PATTERN"),
        (("train.py:make", "--keep", "fp32=*.head", "--precisions", "bf16"), "unknown module '*.head'"),
        (("train.py:make", "--optimizer", "adamm"), "unknown optimizer 'adamm'. Did you mean"),
        (("train.py:make", "--device", "tpu9"), "unknown device 'tpu9'"),
        (("train.py:make", "-o", "."), "-o .: is a folder. Give a file"),
        (("train.py:make", "-o", "no/page.html"), "-o no/page.html: there is no folder no."),
        (("train.py:make", "-o", "train.py"), "-o train.py: exists and is not an ampwise page. Use -f"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(compare, words, said):
    code, out, err = compare(*words)
    assert (code, out) == (2, "")
    told = [line for line in err.splitlines() if line.startswith("ampwise: error: ")]
    assert len(told) == 1
    assert said in err


def test_what_is_no_number_is_refused_by_the_parser(compare):
    with pytest.raises(SystemExit) as caught:
        compare("train.py:make", "--batch", "many")
    assert caught.value.code == 2


def test_force_writes_over_what_is_not_ours(compare, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    code, _, err = compare("train.py:make", "-o", "mine.html")
    assert code == 2
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert "measuring" not in err, "it is refused before minutes are spent"
    assert compare("train.py:make", "--precisions", "bf16", "-q", "-o", "mine.html", "-f")[0] == 0
    assert "mine" not in (tmp_path / "mine.html").read_text()[:200]


def test_equal_loss(compare, monkeypatch):
    from ampwise.tune.bench import equal_loss

    monkeypatch.setattr(equal_loss, "POINTS", 2)
    monkeypatch.setattr(equal_loss, "FEWEST_STEPS", 2)
    words = ("--equal-loss", "--precisions", "bf16,fp32", "--budget", "1", "--seeds", "2", "--device", "cpu")
    code, out, err = compare("train.py:make", *words, "--json", fast=())
    data = json.loads(out)
    assert code == 0
    assert (data["base"], [row["label"] for row in data["rows"]]) == ("bf16", ["bf16", "fp32"])
    assert {(run["label"], run["seed"]) for run in data["runs"]} == {
        (label, seed) for label in ("bf16", "fp32") for seed in (0, 1)
    }
    assert "ampwise: training (" in err


def test_equal_loss_takes_options_of_its_own(compare):
    for words, said in (
        (("--rounds", "3"), "--rounds does not go with --equal-loss"),
        (("-o", "page.html"), "-o does not go with --equal-loss"),
        (("--seeds", "1"), "--seeds 1: expected at least 2"),
        (("--precisions", "fp8-measured"), "cpu has no FP8 tensor cores"),
    ):
        code, _, err = compare("train.py:make", "--equal-loss", *words, "--device", "cpu", fast=())
        assert code == 2
        assert said in err
    code, _, err = compare("train.py:make", "--precisions", "fp8-measured")
    assert code == 2
    assert "unknown precision" in err
