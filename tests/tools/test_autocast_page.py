"""The page of autocast's lists: what it says is what torch does, and another torch than the pinned one is not asked."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ampwise.errors import BadInput
from ampwise.tune.memory.autocast_ops import FP32, FP32_OUTPUT, LOWER, NORMS, PROMOTE
from tools import autocast_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / autocast_page.PAGE
BF16 = torch.bfloat16
PINNED = autocast_page._pinned(ROOT / "constraints.txt")
only_with_the_pin = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED, reason="the page is about another torch"
)


def said(device):
    """What the page's table says of a device, by operation."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: answer for name, *answers in rows if (answer := answers[device == "cpu"]) != "–"}


def functions(*lists):
    return {name.partition(".")[0] for names in lists for name in names}


@only_with_the_pin
def test_the_page_has_the_lists_that_memory_is_predicted_by():
    on_cuda = said("cuda")
    by_answer = {answer: {name for name in on_cuda if on_cuda[name] == answer} for answer in on_cuda.values()}
    assert by_answer.pop("16 bits") == functions(LOWER) | {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert by_answer.pop("FP32") == functions(FP32, FP32_OUTPUT, NORMS)
    assert by_answer.pop("the widest") == functions(PROMOTE)
    assert by_answer == {"refused": {"binary_cross_entropy"}}


@only_with_the_pin
def test_on_this_cpu_it_is_as_the_page_says():
    half, full, square = torch.ones(4, 4, dtype=BF16), torch.ones(4, 4), torch.eye(4)
    calls = {
        "linear": lambda: F.linear(full, square),
        "matmul": lambda: full @ square,
        "mse_loss": lambda: F.mse_loss(half, half),
        "prod": lambda: half.prod(),
        "cat": lambda: torch.cat([half, full]),
        "layer_norm": lambda: F.layer_norm(half, (4,)),
        "softmax": lambda: half.softmax(-1),
        "sum": lambda: half.sum(),
        "exp": lambda: half.exp(),
        "log": lambda: half.log(),
        "pow": lambda: half**2,
    }
    as_said = {"16 bits": BF16, "FP32": torch.float32, "the widest": torch.float32, None: BF16}
    on_cpu = said("cpu")
    with torch.autocast("cpu", BF16):
        assert {name: call().dtype for name, call in calls.items()} == {
            name: as_said[on_cpu.get(name)] for name in calls
        }


@only_with_the_pin
def test_what_the_page_says_in_words():
    on_cuda, on_cpu = said("cuda"), said("cpu")
    for name in ("layer_norm", "softmax", "sum", "exp", "log", "pow"):
        assert on_cuda[name] == "FP32"
        assert name not in on_cpu
    assert on_cuda["log_softmax"] == on_cuda["nll_loss"] == "FP32"
    assert on_cuda["binary_cross_entropy_with_logits"] == "FP32"
    assert not any(name.endswith("_") for name in {*on_cuda, *on_cpu}), "forms that write are on no list"
    with torch.autocast("cpu", BF16):
        assert (torch.ones(2, dtype=BF16) + torch.ones(2)).dtype == torch.float32
        assert torch.relu(torch.ones(2, dtype=BF16)).dtype == BF16
        assert (torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert (torch.ones(2, 2, dtype=BF16) @ torch.ones(2, 2, dtype=BF16)).dtype == BF16


def test_another_torch_than_the_pinned_one_is_not_asked(monkeypatch, tmp_path):
    def never():
        raise AssertionError("asked")

    monkeypatch.setattr(autocast_page, "_asked", never)
    monkeypatch.setattr(autocast_page, "_installed", lambda: "2.6.0")
    assert autocast_page.autocast_page(ROOT) == {}
    assert autocast_page.autocast_page(tmp_path) == {}, "nothing is pinned there"


def test_the_page_of_answers(monkeypatch):
    answers = {
        "cuda": {"mm": "lower", "_mm": "lower", "norm.Scalar": "fp32", "norm.dim": "fp32"},
        "cpu": {"mm": "fp32"},
    }
    monkeypatch.setattr(autocast_page, "_asked", lambda: answers)
    monkeypatch.setattr(autocast_page, "_installed", lambda: PINNED)
    (text,) = autocast_page.autocast_page(ROOT).values()
    assert f"torch {PINNED}." in text
    assert "BF16 or FP16:\n\n`mm`, `_mm`\n" in text
    assert text.endswith("| `mm` | 16 bits | FP32 |\n| `norm` | FP32 | – |\n| `_mm` | 16 bits | – |\n")
    answers["cuda"]["norm.dim"] = "lower"
    with pytest.raises(BadInput, match="overloads of norm differently"):
        autocast_page.autocast_page(ROOT)


@pytest.mark.gpu
def test_on_a_gpu_real_tensors_are_treated_as_fake_ones_are(monkeypatch):
    from tools import autocast_lists

    fake = autocast_lists.lists("cuda")
    monkeypatch.setattr(autocast_lists, "FakeTensorMode", contextlib.nullcontext)
    assert autocast_lists.lists("cuda") == fake
