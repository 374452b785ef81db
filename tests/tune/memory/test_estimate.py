"""ampwise.memory from end to end: what it answers, how it is told, and what it refuses."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.errors import AmpwiseError, BadInput, UnknownName
from ampwise.finding.strict_json import dumps
from ampwise.report.result_view import print_result
from ampwise.tune.memory.allocation_log import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE
from ampwise.tune.memory.allocator import Fit
from ampwise.tune.memory.estimate import memory
from ampwise.tune.memory.result import headline, lines, verdicts

from ...for_each import for_each

SIZES = {"layers": 2, "hidden": 128, "vocab": 512, "seq": 64}


def make(batch=8):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)), nn.Linear(256, 10))
    x, y = torch.zeros(batch, 256), torch.zeros(batch, dtype=torch.long)
    return model, (x, y), lambda x, y: F.cross_entropy(model(x), y)


@pytest.fixture(scope="module")
def answer():
    return memory(make, precisions=["fp32", "tf32", "bf16"], batch=[8, 1024], gpu="h200")


@pytest.mark.nightly
def test_every_precision_and_size_is_answered(answer):
    assert [(each.precision, each.batch) for each in answer.estimates] == [
        (precision, batch) for batch in (8, 1024) for precision in ("fp32", "tf32", "bf16")
    ]
    weights = 3 * (256 * 256 + 256) + 256 * 10 + 10
    assert answer.parameters == answer.trained == weights
    for each in answer.estimates:
        assert each.most[PARAMETERS] == each.most[GRADIENTS] == pytest.approx(4 * weights, rel=0.01)
        assert each.most[STATE] == pytest.approx(8 * weights, rel=0.02)
        assert each.peak == sum(each.split.values()) <= each.reserved < each.needed
        assert each.fits is Fit.YES
    assert answer.at("fp32", 1024).most[ACTIVATIONS] > answer.at("bf16", 1024).most[ACTIVATIONS]
    assert answer.at("fp32").batch == 8


def test_the_largest_batch_fits_and_a_little_more_does_not(answer):
    assert answer.largest_batch["fp32"] == answer.largest_batch["tf32"] < answer.largest_batch["bf16"]
    most = answer.largest_batch["bf16"]
    tried = memory(make, batch=[most, most + most // 50], precisions=["bf16"], gpu="h200", largest=False)
    assert [each.fits is Fit.NO for each in tried.estimates] == [False, True]
    assert tried.largest_batch is None


@pytest.mark.nightly
def test_more_memory_never_means_a_smaller_batch():
    found = [
        memory(make, precisions=["bf16"], gpu=gpu).largest_batch["bf16"] for gpu in ("rtx4090", "a100-sxm-80", "h200")
    ]
    assert found == sorted(found)
    assert found[0] > 0


def test_it_is_plain_data_and_a_page(answer):
    data = json.loads(dumps(answer.as_dict()))
    assert data["estimates"][0]["peak_bytes"] == answer.estimates[0].peak
    assert data["gpu"]["basis"] == "datasheet"
    assert data["largest_batch"] == dict(answer.largest_batch)
    assert "<table" in answer._repr_html_()
    assert str(answer).splitlines()[2].split() == ["batch", "8,", "MiB", "fp32", "tf32", "bf16", "basis"]


def test_what_comes_from_elsewhere_is_no_markup():
    def named(batch=2):
        return make(batch)

    named.__name__ = "<script>"
    page = memory(named, precisions=["fp32"], largest=False)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_the_table_has_a_row_for_every_kind(answer):
    labels = [line.label for line in lines(answer, 8)]
    assert labels[:5] == ["parameters", "gradients", "optimizer state", "cast cache", "activations"]
    assert labels[-1] == "fits"
    assert all(len(line.cells) == 3 for line in lines(answer, 8))
    assert headline(answer) == "make: 200 k parameters; adamw"
    assert any("The largest batch that fits" in said for said in verdicts(answer))


def test_without_a_gpu_it_says_how_large_one_has_to_be(monkeypatch):
    monkeypatch.setattr("ampwise.tune.memory.estimate.local_memory", lambda: None)
    answer = memory(make, precisions=["fp32"])
    assert (answer.gpu, answer.largest_batch, answer.at("fp32").fits) == (None, None, None)
    assert answer.at("fp32").smallest.total == 10 * 2**30
    assert [line.cells for line in lines(answer, 8)][-1] == ("10 GiB",)
    assert not [*verdicts(answer)]


def test_what_does_not_fit_says_on_how_many_ranks_it_would():
    sizes = {"layers": 4, "hidden": 8192, "seq": 16, "vocab": 512}
    answer = memory(**sizes, precisions=["bf16"], gpu="rtx4090", largest=False)
    each = answer.at("bf16")
    assert (each.fits, each.ranks) == (Fit.NO, 4)
    said = " ".join(verdicts(answer))
    assert "It does not fit: bf16 with a batch of 1." in said
    assert "With FSDP it would fit on 4 ranks in bf16." in said
    shared = memory(**sizes, precisions=["bf16"], gpu="rtx4090", fsdp=4, largest=False)
    assert shared.at("bf16").fits is Fit.YES
    assert any("FSDP is derived" in note for note in shared.notes)


def test_the_optimizer_that_a_function_returns_is_used():
    def with_own(batch=2):
        model, arguments, loss = make(batch)
        return model, arguments, loss, torch.optim.SGD(model.parameters(), lr=0.1)

    own = memory(with_own, precisions=["fp32"], largest=False)
    assert (own.optimizer, own.at("fp32").most.get(STATE, 0)) == ("its own SGD", 0)
    asked = memory(with_own, precisions=["fp32"], optimizer="adamw", largest=False)
    assert asked.at("fp32").most[STATE] > 0
    modelled = memory(with_own, precisions=["fp32"], optimizer="adamw8bit", largest=False)
    assert any("two moments of 8 bits" in note for note in modelled.notes)


def test_frozen_weights_have_no_gradients_and_no_state():
    def frozen(batch=2):
        model, arguments, loss = make(batch)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model, arguments, loss

    answer = memory(frozen, precisions=["fp32"], largest=False)
    assert answer.parameters - answer.trained == 256 * 256 + 256
    most = answer.at("fp32").most
    assert most[PARAMETERS] - most[GRADIENTS] == pytest.approx(4 * (256 * 256 + 256), rel=0.01)
    assert "65.8 k frozen" in headline(answer)


def test_what_is_assumed_or_left_out_is_noted():
    def convolution(batch=2):
        model = nn.Conv2d(3, 8, 3)
        return model, torch.zeros(batch, 3, 16, 16), lambda x: model(x).sum()

    def recurrent(batch=2):
        model = nn.LSTM(8, 8)
        return model, torch.zeros(4, batch, 8), lambda x: model(x)[0].sum()

    told = memory(convolution, precisions=["fp32"], compiled=True, largest=False).notes
    assert [note.split(" ", 3)[:3] for note in told] == [
        ["cuDNN", "chooses", "its"],
        ["compiled:", "torch.compile", "decides"],
    ]
    assert any("Recurrent layers" in note for note in memory(recurrent, precisions=["fp32"], largest=False).notes)
    (said,) = memory(**SIZES, precisions=["fp32"], largest=False).notes
    assert "Assumed model" in said
    old = memory(make, gpu="v100-sxm2-16", largest=False)
    assert any("no tensor cores for tf32, bf16" in note for note in old.notes)


def test_what_cudnn_may_take_makes_a_range(capsys):
    def convolution(batch=4):
        model = nn.Sequential(nn.Conv2d(16, 256, 3, padding=1), nn.Conv2d(256, 256, 3, padding=1))
        return model, torch.zeros(batch, 16, 32, 32), lambda x: model(x).sum()

    answer = memory(convolution, precisions=["fp32", "tf32"], compiled=True, largest=False)
    fp32, tf32 = answer.at("fp32"), answer.at("tf32")
    assert fp32.peak - fp32.least > 200 * 2**20  # tiles of 256 × 256 weights, transformed
    assert fp32.least == tf32.least < tf32.peak < fp32.peak
    assert fp32.most["workspaces"] == 0  # cuBLAS has none where nothing is multiplied
    least, most = fp32.compiled_peak
    assert least < fp32.least < most == fp32.peak
    print_result(answer)
    out = capsys.readouterr().out
    assert "cuDNN workspaces" in out
    assert "without cuDNN's" in out
    assert f"{least / 2**20:.1f}–{most / 2**20:.1f}" in out
    plain = memory(make, precisions=["fp32"], largest=False).at("fp32")
    assert plain.least == plain.peak


def test_fp8_keeps_half_of_what_bf16_keeps_of_an_input():
    def linear(batch=4096):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        return model, torch.zeros(batch, 1024), lambda x: model(x).float().sum()

    answer = memory(linear, precisions=["bf16", "fp8"], largest=False)
    kept = [answer.at(name).most[ACTIVATIONS] for name in ("bf16", "fp8")]
    numbers = 4096 * 1024
    # The first and the last layer stay in BF16; the two between keep their inputs and weights in one byte.
    assert kept[0] - kept[1] == pytest.approx(2 * numbers - 2 * 1024 * 1024, rel=0.1)


def with_item(batch=2):
    model, (x, y), _ = make(batch)

    def loss(x, y):
        found = F.cross_entropy(model(x), y)
        return found if found.item() > 0 else -found  # asks

    return model, (x, y), loss


def with_nonzero(batch=2):
    model, (x, y), _ = make(batch)
    return model, (x, y), lambda x, y: model(x[x[:, 0] > 0]).sum()


def that_asks_while_made(batch=2):
    model, arguments, loss = make(batch)
    if model[-1].weight.sum() > 0:
        print("positive")
    return model, arguments, loss


@for_each(
    ("function", "operation"),
    [(with_item, r"\.item\(\)"), (with_nonzero, "nonzero"), (that_asks_while_made, r"\.item\(\)")],
)
def test_code_that_asks_for_values_is_reported_where(function, operation):
    with pytest.raises(BadInput) as caught:
        memory(function, precisions=["fp32"])
    said = rf"{function.__name__}: the step reads the values of a tensor \({operation}\) \(test_estimate\.py:\d+\), "
    caught.match(said)
    assert "\n" not in str(caught.value)


@for_each(
    ("arguments", "error", "said"),
    [
        ({}, BadInput, "no model given: name your function, train.py:make, or give sizes such as --params 7B."),
        (
            {"what": make, "params": "7B"},
            BadInput,
            "a model from a function has its own sizes; leave out --params.",
        ),
        ({"what": make, "kv_heads": 2}, BadInput, "leave out --kv-heads."),
        ({"what": make, "batch": 0}, BadInput, "--batch 0: expected at least 1 row."),
        ({"what": make, "batch": [4, -1]}, BadInput, "--batch 4,-1: expected at least 1 row."),
        (
            {"what": make, "precisions": ["float17"]},
            UnknownName,
            "The precisions are fp32, tf32, fp16, bf16, fp8, bf16-pure; after bf16-pure and a comma, kahan, "
            "bf16-states or elementwise.",
        ),
        (
            {"what": make, "precisions": ["bf16", "fp8"]},
            BadInput,
            "no linear layer of this model can run in FP8",
        ),
        (
            {"what": make, "precisions": ["emulate:mxfp8"]},
            BadInput,
            "precision 'emulate:mxfp8': its memory cannot be predicted yet. Use fp32, which "
            "it computes in; rounded copies add to that.",
        ),
        ({"what": make, "precisions": ["emulate:mxfp9"]}, UnknownName, "unknown format 'mxfp9'"),
        ({"what": make, "precisions": ["kahan"]}, BadInput, "'kahan' is an option of bf16-pure: bf16-pure,kahan."),
        ({"what": make, "optimizer": "adam8bits"}, UnknownName, "Did you mean adam8bit or adamw8bit"),
        ({"what": make, "gpu": "h300"}, UnknownName, "unknown device 'h300'"),
        ({"what": make, "fsdp": 0}, BadInput, "--fsdp 0: expected at least 1 rank."),
        ({"params": "0"}, BadInput, "--params 0: expected a number of parameters"),
        ({"layers": 2, "hidden": 100, "heads": 3}, BadInput, "not divisible by the number of heads"),
        ({"what": "nonesuch:make"}, BadInput, "nonesuch cannot be loaded"),
        ({"what": "make"}, BadInput, "expected train.py:make or train:make"),
        (
            {"what": nn.Linear},
            BadInput,
            r"it must be callable without arguments, but requires in_features, out_features",
        ),
        ({"what": lambda: 5}, BadInput, "it returned an int; expected a function that returns the model"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, error, said):
    with pytest.raises(error) as caught:
        memory(arguments.pop("what", None), **arguments)
    assert said in str(caught.value)
    assert isinstance(caught.value, AmpwiseError)


def test_a_step_that_fails_is_reported_in_a_line():
    def broken(batch=2):
        model = nn.Linear(8, 8)
        return model, torch.zeros(batch, 9), lambda x: model(x).sum()

    with pytest.raises(BadInput, match=r"^broken: a training step failed: RuntimeError: .*\(test_estimate.py:\d+\)\.$"):
        memory(broken)


def test_what_is_done_is_reported():
    told = []
    memory(make, precisions=["fp32", "tf32", "bf16"], largest=False, progress=told.append)
    assert told == ["fp32", "bf16"]  # TF32 is FP32 in memory
