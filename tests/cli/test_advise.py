"""`ampwise advise`, as it is read, as it is parsed, and as it asks."""

from __future__ import annotations

import builtins
import json
import re
import sys

import pytest

import ampwise.hardware.target
from ampwise.cli import main
from ampwise.hardware import Cpu, Fp32Switches, Machine, TorchInfo


@pytest.fixture(autouse=True)
def plain_page(monkeypatch):
    """The same page whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def on_a_cpu(monkeypatch):
    """A machine without a GPU."""
    facts = TorchInfo(
        version="2.13.0",
        cuda=None,
        hip=None,
        devices=(),
        mps=False,
        fp32=Fp32Switches(matmul_tf32=False, convolution_tf32=True, matmul_precision="highest"),
        problem=None,
    )
    cpu = Cpu(model="a Xeon", features=("amx_bf16",))
    here = Machine(python="3.12.1", platform="Linux", cpu=cpu, driver=None, torch=facts)
    monkeypatch.setattr(ampwise.hardware.target, "describe_machine", lambda: here)


@pytest.fixture
def answering(monkeypatch):
    """A terminal at which somebody types these lines; the end of them is Ctrl-D."""

    def answer(*lines):
        typed, asked = iter(lines), []

        def read(prompt):
            asked.append(prompt)
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        return asked

    return answer


def advised(capsys, *words):
    code = main(["advise", *words])
    return code, capsys.readouterr()


def test_the_answer_is_in_the_first_two_lines(capsys):
    code, said = advised(capsys, "--gpu", "v100-sxm2-16", "--want", "bf16")
    assert code == 1
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[:4] == [
        "NO: V100 SXM2 16GB (compute capability 7.0) has no BF16 tensor cores: torch emulates BF16 there, yet reports",
        "it as supported.",
        "Train a model in FP16 with a dynamic loss scale on V100 SXM2 16GB.",
        "",
    ]
    assert "no        AMP701 bf16-without-tensor-cores" in lines
    assert "instead   Use FP16 with a GradScaler on this GPU, and check" in lines
    assert any(line.startswith("to know   ampwise bench train.py:make --precisions fp32,fp16,bf16") for line in lines)
    assert "          0.8–6.0×" not in lines
    assert (
        "speed-up  0.8–6.0× FP32 [derived: ceiling 8.0× by dense peaks (datasheet); the range is wide because the size"
        in lines
    )
    assert "scaler = torch.amp.GradScaler(device)  # starts at 65536, adjusts itself" in lines
    assert 'engine = ampwise.Engine(model.to(device), optimizer, "fp16", clip_norm=1.0)' in lines


def test_of_a_family_the_variant_is_named(capsys):
    code, said = advised(capsys, "--gpu", "a100", "--params", "124M")
    assert code == 0
    assert said.err == "ampwise: a100 is taken as A100 SXM 80GB; others: a100-40, a100-pcie-80\n"
    assert "on A100 SXM 80GB." in said.out.splitlines()[0]
    assert advised(capsys, "--gpu", "4090")[1].err == ""


def test_a_plain_question_has_a_plain_answer(capsys):
    code, said = advised(capsys, "--gpu", "h200", "--params", "124M", "--arch", "transformer")
    assert code == 0
    assert said.out.startswith(
        "Train a transformer of 124 M parameters in BF16 without a loss scale on H200 SXM 141GB.\n\nwhy "
    )
    assert "GPT-2 124 M, 16×1024 tokens: 6.0x as fast as FP32 (325 k tokens/s) [measured on one H200]" in said.out
    assert len(said.out.splitlines()) < 60


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_keep_to_the_page(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, said = advised(capsys, "--gpu", "a100-40", "--params", "7B", "--symptom", "nan", "--idea", "autocast-off")
    text = said.out.partition("# with ampwise")[0]
    assert columns - 10 < max(len(line) for line in text.splitlines()) <= columns


def test_the_list_keeps_to_the_page(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, said = advised(capsys, "--ideas")
    assert 50 < max(len(line) for line in said.out.splitlines()) <= 60


def test_whoever_is_in_trouble_gets_one_listing(capsys):
    _, said = advised(capsys, "--gpu", "v100-sxm2-16", "--params", "124M", "--symptom", "nan")
    assert "# with ampwise; with torch.amp: code.torch of --json\n" in said.out
    assert "engine.step(" in said.out
    assert "scaler.update()" not in said.out
    assert len(said.out.splitlines()) <= 50
    _, asked = advised(capsys, "--gpu", "v100-sxm2-16", "--params", "124M", "--symptom", "nan", "--json")
    assert "scaler.update()" in json.loads(asked.out)["code"]["torch"]


def test_colour_is_only_paint(capsys, monkeypatch):
    words = ("--gpu", "v100-sxm2-16", "--want", "bf16", "--symptom", "nan")
    _, plain = advised(capsys, *words)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, painted = advised(capsys, *words)
    assert painted.out != plain.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted.out) == plain.out


def test_json(capsys):
    code, said = advised(capsys, "--gpu", "v100-sxm2-16", "--want", "bf16", "--scaling", "manual:8", "--json")
    data = json.loads(said.out)
    assert code == 1
    assert (data["precision"], data["refused"], data["asked"]["want"]) == ("fp16", True, "bf16")
    assert data["asked"]["device_id"] == "v100-sxm2-16"
    assert data["loss_scale"]["init_scale"] == 65536.0
    assert data["speedup"]["basis"] == "derived"
    assert [finding["code"] for finding in data["findings"]] == ["AMP701", "AMP308"]
    evidence = data["findings"][0]["evidence"]
    assert (evidence["answer"], evidence["refuses"]) == ("no", "bf16")
    assert evidence["to_know"]["command"].startswith("ampwise bench")
    compile(data["code"]["torch"], "pasted", "exec")


def test_this_machine(capsys, on_a_cpu):
    code, said = advised(capsys)
    assert code == 0
    assert said.out.startswith("Train a model in BF16 without a loss scale on this CPU (a Xeon).")
    assert "torch sees no GPU here, so this is about the CPU" in said.out.replace("\n          ", " ")
    assert "amx_bf16 (BF16 matrix tiles) [read here]" in said.out.replace("\n          ", " ")


def test_a_cpu_by_name_needs_no_torch(capsys):
    code, said = advised(capsys, "--gpu", "CPU")
    assert code == 0
    assert "on this CPU" in said.out.splitlines()[0]


def test_measured(capsys):
    code, said = advised(capsys, "--gpu", "a100-40", "--params", "124M", "--want", "bf16", "--measured", "1.05x")
    assert code == 1
    assert said.out.startswith("NO: the measured 1.05x over FP32 is no gain.\n")
    assert "in TF32 on A100 40GB." in said.out


def test_the_names_are_listed(capsys):
    code, said = advised(capsys, "--ideas")
    assert code == 0
    assert "  autocast-off               there are NaNs: just turn autocast off\n" in said.out
    assert "--symptom\n  nan " in said.out
    assert "--arch\n  transformer " in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "580"], "unknown device '580'."),
        (["--gpu", "99.9"], "compute capability '99.9': expected 3.x to 12.x; `ampwise gpu --list` shows devices"),
        (["--gpu", "0.0"], "compute capability '0.0': expected 3.x to 12.x;"),
        (["--gpu", "v100-sxm9"], "unknown device 'v100-sxm9'. Did you mean v100-"),
        (
            ["--gpu", "h200", "--params", "lots"],
            "--params lots: expected a number of parameters, such as 124M, 7B or 1.3e9.",
        ),
        (["--gpu", "h200", "--params", "-1"], "--params -1: expected a number of parameters"),
        (["--gpu", "h200", "--want", "int3"], "unknown precision 'int3'."),
        (["--gpu", "h200", "--idea", "autocast"], "unknown idea 'autocast'. Did you mean autocast-off"),
        (["--gpu", "h200", "--symptom", "nap"], "unknown symptom 'nap'. Did you mean nan"),
        (["--gpu", "h200", "--arch", "brain"], "unknown kind of model 'brain'."),
        (["--gpu", "h200", "--scaling", "some"], "scaling 'some': expected none, dynamic, manual or manual:1000."),
        (["--gpu", "h200", "--measured", "fast"], "--measured 'fast': expected a number such as 1.8."),
        (["nowhere:make", "--gpu", "h200"], "nowhere:make: there is no module 'nowhere'."),
        (["train", "--gpu", "h200"], "'train': expected train.py:make or train:make"),
        (["json:dumps", "--params", "7B", "--gpu", "h200"], "advise(): give either a model or params"),
    ],
)
def test_nonsense_is_one_clear_line(capsys, words, message):
    code, said = advised(capsys, *words)
    assert code == 2
    assert said.out == ""
    assert said.err.startswith(f"ampwise: error: {message}")
    assert said.err.count("\n") == 1


def test_a_subject_is_read_and_what_it_prints_is_kept_apart(capsys, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make(batch=4):\n    print('made')\n    model = nn.Sequential()\n"
        "    model.router, model.head = nn.Linear(64, 64), nn.Linear(64, 2)\n"
        "    return model, (torch.ones(batch, 64),), lambda x: model.head(model.router(x)).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    code, said = advised(capsys, "train.py:make", "--gpu", "h200", "--want", "bf16")
    assert code == 0
    assert said.err == "made\n"
    assert "routers: router (by the policy)" in said.out
    assert 'policy = ampwise.Policy("bf16").keep("fp32", "router")' in said.out
    assert "ampwise bench train.py:make" in said.out


# On a terminal


def test_it_asks_and_then_answers(capsys, answering):
    asked = answering("v100-sxm2-16", "124M", "transformer", "bf16", "nan")
    code, said = advised(capsys)
    assert code == 1
    assert len(asked) == 5
    assert all(re.search(r"\[.+\] $", question) for question in asked)
    assert said.out.startswith("NO: V100 SXM2 16GB")
    assert "Train a transformer of 124 M parameters in FP16" in said.out
    assert "First (the loss is NaN or inf):" in said.out


def test_enter_takes_what_is_in_brackets(capsys, answering, on_a_cpu):
    answering("", "", "", "", "")
    code, said = advised(capsys)
    assert code == 0
    assert said.out.startswith("Train a model in BF16 without a loss scale on this CPU (a Xeon).")


def test_what_is_in_brackets_may_be_typed(capsys, answering, on_a_cpu):
    asked = answering("This machine", "unknown", "UNKNOWN", "none", "nothing")
    code, said = advised(capsys)
    assert (code, len(asked)) == (0, 5)
    assert said.out.startswith("Train a model in BF16 without a loss scale on this CPU (a Xeon).")


def test_nonsense_is_asked_again(capsys, answering):
    asked = answering("a gpu", "h200", "many", "7B", "brain", "moe", "fp61", "fp16", "ache", "slow")
    code, said = advised(capsys)
    assert code == 0
    assert [question.split()[0] for question in asked] == [
        word for word in ("Which", "How", "What", "Which", "What") for _ in (0, 1)
    ]
    assert said.err.count("  unknown ") == 4
    assert "  --params many: expected a number of parameters" in said.err
    assert "a mixture of experts of 7 B parameters in FP16" in said.out


@pytest.mark.parametrize("key", [KeyboardInterrupt(), EOFError()], ids=["Ctrl-C", "Ctrl-D"])
def test_leaving_is_clean(capsys, answering, key):
    answering("h200", key)
    code, said = advised(capsys)
    assert code == 130
    assert said.out == ""
    assert said.err.endswith("ampwise: interrupted\n")
    assert "Traceback" not in said.err


@pytest.mark.parametrize("words", [["--json"], ["--gpu", "h200"], ["--ideas"]], ids=" ".join)
def test_whoever_asks_something_is_not_asked(capsys, answering, on_a_cpu, words):
    asked = answering()
    code, _ = advised(capsys, *words)
    assert (code, asked) == (0, [])
