"""The kernel that attention takes on a GPU: which one, what it keeps, and what it takes for its backward pass.

The numbers are those of an H200 with torch 2.11 and cuDNN 9.19: bytes that a forward pass left, and the most that the
backward pass added to them.
"""

import pytest
import torch
import torch.nn.functional as F

from ampwise.tune.memory import attention
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.attention import AttentionKernel, choose_kernel
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.kernel_buffers import SCRATCH
from ampwise.tune.memory.tracker import AllocationTracker

from ...for_each import for_each

FP32, BF16 = torch.float32, torch.bfloat16
CUDNN, FLASH, EFFICIENT, MATH = AttentionKernel
H100, A100 = (9, 0), (8, 0)
HEADS = 8

# dtype, rows, length, width, heads of keys, the mask's shape, what kind of mask it is; and what was measured
MEASURED = [
    (FP32, 4, 512, 64, 8, None, "", EFFICIENT, 4259840, 16908288),
    (FP32, 4, 512, 72, 8, None, "", EFFICIENT, 4784128, 22614016),
    (FP32, 4, 512, 192, 8, None, "", EFFICIENT, 12648448, 50462720),
    (FP32, 4, 197, 64, 8, None, "", EFFICIENT, 1642496, 6966272),
    (FP32, 4, 512, 64, 8, (4, 1, 512, 512), "marks", EFFICIENT, 8454144, 16908288),
    (FP32, 4, 512, 64, 8, (1, 8, 512, 512), "trained", EFFICIENT, 4259840, 54460416),
    (FP32, 4, 197, 64, 8, (1, 8, 197, 197), "trained", EFFICIENT, 2903552, 12211200),
    (FP32, 4, 512, 64, 2, None, "", MATH, 50331648, 100663296),
    (FP32, 4, 512, 64, 2, (4, 1, 512, 512), "marks", MATH, 50331648, 100663296),
    (FP32, 4, 512, 63, 8, None, "", MATH, 50069504, 100663296),
    (BF16, 4, 512, 64, 8, None, "", CUDNN, 2163712, 10551808),
    (BF16, 4, 512, 40, 8, None, "", CUDNN, 1377280, 6619648),
    (BF16, 4, 512, 256, 2, None, "", CUDNN, 8455168, 46203392),
    (BF16, 4, 512, 64, 2, (4, 1, 512, 512), "marks", CUDNN, 4260864, 11600384),
    (BF16, 64, 49, 64, 8, (64, 1, 49, 49), "added", CUDNN, 3312640, 16157184),
    (BF16, 64, 49, 64, 8, (1, 8, 49, 49), "trained", EFFICIENT, 3386368, 21342208),
    (BF16, 4, 512, 64, 8, (8, 512, 512), "added", EFFICIENT, 2162688, 10555392),
]


@pytest.fixture(autouse=True)
def torch_2_11(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")


def arguments(dtype, rows, length, width, key_heads, mask, kind):
    """Query, key and value as projections make them, and a mask."""
    parts = [torch.zeros(rows, length, heads, width, dtype=dtype) for heads in (HEADS, key_heads, key_heads)]
    bias = None if mask is None else torch.zeros(mask, dtype=torch.bool if kind == "marks" else dtype)
    if bias is not None:
        bias.requires_grad_(kind == "trained")
    return [part.requires_grad_() for part in parts], bias


@for_each(("dtype", "rows", "length", "width", "key_heads", "mask", "kind", "kernel", "kept", "added"), MEASURED)
def test_a_pass_takes_what_it_took_on_an_h200(dtype, rows, length, width, key_heads, mask, kind, kernel, kept, added):
    grouped = key_heads < HEADS
    with without_memory(), as_cuda(H100):
        parts, bias = arguments(dtype, rows, length, width, key_heads, mask, kind)
        heads = [part.transpose(1, 2) for part in parts]
        assert choose_kernel(*heads, bias, causal=False, grouped=grouped, cudnn=True) is kernel
        with AllocationTracker(SCRATCH) as tracker:
            tracker.adopt("inputs", [*parts, *([bias] if mask else [])])
            with tracker.phase("forward"):
                out = F.scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=grouped)
            gradient = torch.ones_like(out)
            with tracker.phase("backward"):
                out.backward(gradient)
    log = tracker.log()
    levels, forward, backward = log.levels(), log.phase("forward"), log.phase("backward")
    assert levels[forward.end] - levels[forward.start] == pytest.approx(kept, rel=0.001)
    assert log.peak(backward) - levels[backward.start] == pytest.approx(added, rel=0.005)


def test_cudnn_comes_first_only_where_torch_prefers_it(monkeypatch):
    prefers = attention.prefers_cudnn
    assert prefers(H100)
    assert prefers(None)
    assert not prefers(A100)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu129")
    assert not prefers(H100)
    with without_memory():
        parts, _ = arguments(BF16, 2, 64, 64, 8, None, "")
        heads = [part.transpose(1, 2) for part in parts]
        for capability in (H100, A100):
            chosen = choose_kernel(*heads, None, causal=False, grouped=False, cudnn=prefers(capability))
            assert chosen is FLASH
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert choose_kernel(*heads, None, causal=False, grouped=False, cudnn=True) is MATH
