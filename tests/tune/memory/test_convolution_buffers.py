"""What cuDNN takes for convolutions, against what an H200 took (torch 2.11, cuDNN 9.19), in KiB."""

import pytest
import torch
import torch.nn.functional as F

from ampwise.tune.memory.allocation_log import CUDNN
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.convolution_buffers import convolution_buffers
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.tracker import AllocationTracker

from ...for_each import for_each

FP32, BF16 = torch.float32, torch.bfloat16

# dtype, TF32, (rows, channels, side, kernel, outputs, stride, padding, groups), KiB in the forward and backward pass
MEASURED = [
    (FP32, False, (16, 64, 56, 3, 64, 1, 1, 1), 0, 57024),
    (FP32, False, (16, 128, 28, 3, 128, 1, 1, 1), 0, 87040),
    (FP32, False, (16, 256, 14, 3, 256, 1, 1, 1), 0, 27648),
    (FP32, False, (16, 512, 7, 3, 512, 1, 1, 1), 0, 46080),
    (FP32, False, (16, 256, 32, 3, 256, 1, 1, 1), 0, 348160),
    (FP32, False, (16, 384, 64, 3, 128, 1, 1, 1), 0, 301824),
    (FP32, False, (8, 512, 28, 3, 512, 1, 1, 1), 0, 93312),
    (FP32, False, (16, 1024, 14, 1, 256, 1, 0, 1), 0, 15680),
    (FP32, False, (16, 256, 56, 1, 64, 1, 0, 1), 0, 0),
    (FP32, False, (16, 3, 224, 7, 64, 2, 3, 1), 0, 0),
    (FP32, False, (16, 3, 224, 16, 768, 16, 0, 1), 0, 25024),
    (FP32, False, (16, 96, 56, 7, 96, 1, 3, 96), 0, 0),
    (FP32, True, (8, 64, 224, 3, 64, 1, 1, 1), 200848, 202864),
    (FP32, True, (16, 2048, 7, 1, 512, 1, 0, 1), 7840, 7840),
    (FP32, True, (16, 128, 56, 3, 128, 2, 1, 1), 31936, 35968),
    (BF16, False, (16, 128, 56, 3, 128, 2, 1, 1), 15968, 15968),
    (BF16, False, (16, 384, 64, 3, 128, 1, 1, 1), 66400, 66400),
    (BF16, False, (16, 3, 224, 7, 64, 2, 3, 1), 37681, 43561),
    (BF16, False, (16, 512, 28, 1, 128, 1, 0, 1), 0, 4096),
    (BF16, False, (16, 144, 72, 5, 144, 2, 2, 144), 0, 0),
]


def taken(dtype, tf32, shape, layout=torch.contiguous_format):
    rows, channels, side, kernel, outputs, stride, padding, groups = shape
    with without_memory(), as_cuda((9, 0)):
        x = torch.zeros(rows, channels, side, side, dtype=dtype).to(memory_format=layout).requires_grad_()
        weight = torch.zeros(outputs, channels // groups, kernel, kernel, dtype=dtype).requires_grad_()
        with AllocationTracker(convolution_buffers(tf32=tf32)) as tracker:
            tracker.adopt("inputs", [x, weight])
            F.conv2d(x, weight, None, stride, padding, 1, groups).sum().backward()
    log = tracker.log()
    return [size for size, kind in zip(log.sizes, log.kinds, strict=True) if kind == CUDNN]


@for_each(("dtype", "tf32", "shape", "forward", "backward"), MEASURED)
def test_cudnn_takes_what_it_took_on_an_h200(dtype, tf32, shape, forward, backward):
    found = taken(dtype, tf32, shape)
    assert [size / 1024 for size in found] == pytest.approx([forward, backward], rel=0.15)


def test_channels_last_are_not_copied():
    shape = (16, 128, 56, 3, 128, 2, 1, 1)
    assert taken(BF16, False, shape, torch.channels_last) == [0, 0]
    assert all(taken(BF16, False, shape))


def test_a_log_without_them_keeps_all_else():
    with without_memory(), as_cuda():
        x = torch.zeros(4, 64, 32, 32, dtype=BF16)
        with AllocationTracker(convolution_buffers(tf32=False)) as tracker, tracker.phase("forward"):
            kept = F.conv2d(x, torch.zeros(64, 64, 3, 3, dtype=BF16), padding=1)
    log = tracker.log()
    assert log.without(CUDNN).peak() == log.peak() - max(log.most()[CUDNN], 0)
    assert log.without(CUDNN).events == log.events
    assert kept.shape == x.shape
