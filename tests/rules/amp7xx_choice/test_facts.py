"""The facts that rules about choices state, asked of torch itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...for_each import for_each

ASK_CUDA = """
import torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.no_grad():
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    x = torch.empty(4, 8, device="cuda", dtype=torch.float16)
    y = torch.empty(4, device="cuda", dtype=torch.long)
    for name, value in {
        "layer_norm": F.layer_norm(x, (8,)), "group_norm": F.group_norm(x, 2), "softmax": x.softmax(-1),
        "exp": x.exp(), "log": x.log(), "sum": x.sum(), "cross_entropy": F.cross_entropy(x, y),
        "mean": x.mean(), "sigmoid": x.sigmoid(), "sqrt": x.sqrt(), "product": x * x, "mm": x @ x.T,
    }.items():
        print(name, str(value.dtype).removeprefix("torch."))
"""


@pytest.mark.nightly
def test_what_cuda_autocast_keeps_in_fp32(warm, tmp_path):
    done = warm.run("-c", ASK_CUDA, cwd=tmp_path)
    types = dict(line.split() for line in done.stdout.splitlines())
    wide = {name for name, dtype in types.items() if dtype == "float32"}
    assert wide == {"layer_norm", "group_norm", "softmax", "exp", "log", "sum", "cross_entropy"}, done.stderr


@for_each(
    ("compute", "dtype"),
    [
        (lambda x: F.layer_norm(x, (8,)), torch.bfloat16),
        (lambda x: x.softmax(-1), torch.bfloat16),
        (lambda x: x.exp(), torch.bfloat16),
        (lambda x: x.sum(), torch.bfloat16),
        (lambda x: F.mse_loss(x, x), torch.float32),
        (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), torch.float32),
        (lambda x: F.binary_cross_entropy_with_logits(x, x), torch.float32),
    ],
)
def test_what_a_cpu_keeps(compute, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        assert compute(torch.zeros(4, 8, dtype=torch.bfloat16)).dtype == dtype


def test_autocast_leaves_complex_numbers_alone():
    a = torch.ones(2, 2, dtype=torch.complex64)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.complex64


def test_switching_autocast_off_casts_nothing():
    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        scores = F.linear(x, torch.ones(4, 8))
        with torch.autocast("cpu", enabled=False):
            assert scores.logsumexp(-1).dtype == torch.bfloat16


def test_checkpointing_computes_again_under_the_same_autocast():
    seen = []
    layer = nn.Linear(4, 4)

    def block(x):
        y = layer(x)
        seen.append(y.dtype)
        return layer(y)  # what is computed again ends with the last tensor that is needed

    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpoint(block, torch.ones(2, 4, requires_grad=True), use_reentrant=False).float().sum()
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_the_range_of_fp16():
    half = torch.tensor([2.0**-25, 2.0**-25 * 1.01, 65504.0, 65520.0, math.exp(11.08), math.exp(11.1)]).half()
    assert half.tolist()[:2] == [0.0, 2.0**-24]
    assert half.isinf().tolist()[2:] == [False, True, False, True]
    assert torch.tensor(1e-8).half() == 0


def test_updates_that_are_lost():
    assert torch.tensor(1.0).half() + torch.tensor(1 / 2048).half() == 1
    assert torch.tensor(1.0).bfloat16() - torch.tensor(1 / 512).bfloat16() == 1
    assert torch.tensor(256.0).bfloat16() + 1 == 256


def test_scores_that_cancel():
    near = torch.tensor([100.3, 100.0]).bfloat16()
    assert abs((near[0] - near[1]).item() - 0.3) > 0.15


def test_a_start_of_1024_saves_six_skips():
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)  # noqa: AMP302
    assert math.log2(scaler.get_scale() / 1024) == 6
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2000, 2.0, 0.5)


def test_tf32_is_off_for_products_and_on_for_convolutions(warm, tmp_path):
    code = "import torch; b = torch.backends; print(b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32)"
    assert warm.run("-c", code, cwd=tmp_path).stdout.split() == ["False", "True"]
