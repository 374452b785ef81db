"""Recurrent layers as cuDNN runs them, against what an H200 took for them (torch 2.11, cuDNN 9.19)."""

import pytest
import torch
from torch import nn

from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.tracker import AllocationTracker

from ...for_each import for_each

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# kind, dtype, whether by autocast, (rows, length, inputs, hidden), options; bytes kept, and the peaks of both passes
MEASURED = [
    ("LSTM", FP32, False, (16, 128, 512, 512), {}, 25231872, 71795712, 59228672),
    ("LSTM", FP32, False, (16, 128, 512, 512), {"num_layers": 3, "dropout": 0.2}, 75956736, 161022976, 114672128),
    (
        "LSTM",
        FP32,
        False,
        (16, 400, 1280, 768),
        {"num_layers": 4, "bidirectional": True},
        944505344,
        1624376320,
        933822976,
    ),
    ("LSTM", BF16, True, (16, 128, 512, 512), {}, 18915840, 79963136, 67314176),
    (
        "LSTM",
        BF16,
        True,
        (16, 128, 512, 512),
        {"num_layers": 2, "bidirectional": True, "dropout": 0.1},
        74088960,
        163349504,
        112230912,
    ),
    ("LSTM", BF16, False, (32, 256, 1024, 1024), {"num_layers": 3, "dropout": 0.2}, 354861568, 566936576, 279626240),
    ("LSTM", FP16, False, (16, 128, 512, 512), {}, 12616192, 73597952, 67314176),
    (
        "GRU",
        FP32,
        False,
        (16, 128, 512, 512),
        {"num_layers": 2, "bidirectional": True, "dropout": 0.1},
        118096384,
        247071744,
        164807168,
    ),
    (
        "GRU",
        BF16,
        True,
        (16, 400, 1280, 768),
        {"num_layers": 4, "bidirectional": True},
        649732608,
        994714624,
        443818496,
    ),
    ("GRU", BF16, False, (32, 128, 512, 512), {}, 32545280, 73636864, 48470528),
    ("RNN", FP32, False, (16, 256, 512, 512), {}, 16810496, 86213632, 79925760),
    ("LSTM", FP32, False, (16, 128, 512, 512), {"num_layers": 2, "proj_size": 128}, 57754112, 113443840, 67863040),
]


@for_each(("kind", "dtype", "autocast", "sizes", "options", "kept", "forward", "backward"), MEASURED)
def test_layers_keep_what_cudnn_kept(kind, dtype, autocast, sizes, options, kept, forward, backward):
    rows, length, inputs, hidden = sizes
    with without_memory(), as_cuda((9, 0)):
        net = getattr(nn, kind)(inputs, hidden, batch_first=True, **options)
        net = net if autocast else net.to(dtype)
        x = torch.zeros(rows, length, inputs, dtype=FP32 if autocast else dtype).requires_grad_()
        with AllocationTracker() as tracker:
            tracker.adopt("inputs", [x, *net.parameters()])
            with tracker.phase("forward"), torch.autocast("cpu", BF16 if dtype == FP32 else dtype, enabled=autocast):
                out = net(x)[0]
            gradient = torch.ones_like(out)
            with tracker.phase("backward"):
                out.backward(gradient)
        assert x.grad.dtype == x.dtype
        assert all(weight.grad.dtype == weight.dtype for weight in net.parameters())
    log = tracker.log()
    levels, first, second = log.levels(), log.phase("forward"), log.phase("backward")
    assert levels[first.end] - levels[first.start] == pytest.approx(kept, rel=0.005)
    assert log.peak(first) - levels[first.start] == pytest.approx(forward, rel=0.12)
    assert log.peak(second) - levels[second.start] == pytest.approx(backward, rel=0.15)
