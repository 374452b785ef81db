"""Memory that kernels take for themselves: by their arguments, and as an H200 was seen to take it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampwise.tune.memory.allocation_log import rounded
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.kernel_buffers import SCRATCH, row_sum, row_sum_buffer
from ampwise.tune.memory.tracker import AllocationTracker

from ...for_each import for_each

FLOAT = 4


def taken(work):
    """By how much the peak is higher for the kernels' own memory."""
    peaks = []
    for scratch in (SCRATCH, {}):
        with without_memory(), as_cuda():
            run = work()
            with AllocationTracker(scratch) as tracker:
                run()
            peaks.append(tracker.log().peak())
    return peaks[0] - peaks[1]


def test_flash_attentions_backward_pass_adds_up_in_fp32():
    def work():
        query = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        out = F.scaled_dot_product_attention(query, query, query)
        return lambda: out.backward(torch.ones_like(out))

    assert taken(work) > 0
    query = torch.empty(2, 4, 250, 50, device="meta")
    backward = SCRATCH[torch.ops.aten._scaled_dot_product_flash_attention_backward.default]
    assert backward(query, query, query) == 2 * 4 * 256 * FLOAT * (64 + 1)  # rows and heads are padded


@pytest.mark.parametrize(("tokens", "parts"), [(3072, 0), (4096, 409 + 1000)])
def test_an_embeddings_backward_pass_adds_up_in_parts(tokens, parts):
    def work():
        out = nn.Embedding(1000, 64)(torch.zeros(tokens, dtype=torch.long))
        return lambda: out.backward(torch.ones_like(out))

    assert taken(work) == (rounded(4 * tokens * 8 + parts * 64 * FLOAT) if parts else 0)


def test_a_bias_has_its_gradient_from_a_sum_over_rows():
    def work():
        out = nn.Linear(8, 512)(torch.zeros(4096, 8))
        return lambda: out.backward(torch.ones_like(out))

    assert taken(work) == row_sum_buffer(4096, 512) == 16 * 2**20


@for_each(
    ("shape", "dims", "rows"),
    [
        ((4096, 512), [0], 4096),
        ((64, 64, 512), [0, 1], 4096),
        ((64, 64, 512), [-3, -2], 4096),
        ((4096, 512), [1], None),
        ((4096, 512), [0, 1], None),
        ((4096, 512), None, None),
        ((0, 512), [0], None),
    ],
)
def test_only_sums_over_leading_dimensions_need_a_buffer(shape, dims, rows):
    x = torch.empty(shape, device="meta")
    assert row_sum(x, dims) == (0 if rows is None else row_sum_buffer(rows, 512))
    if len(shape) == 2 and dims == [0]:
        assert row_sum(x.t().contiguous().t(), dims) == 0


MIB = 2**20


@for_each(("rows", "columns", "mebibytes"), [(4096, 512, 16), (16384, 512, 64), (4096, 2048, 64)])
def test_the_buffer_is_what_was_measured(rows, columns, mebibytes):
    assert row_sum_buffer(rows, columns) == mebibytes * MIB


@given(st.integers(1, 255), st.integers(1, 100_000))
def test_few_rows_need_none(rows, columns):
    assert row_sum_buffer(rows, columns) == 0


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 16))
def test_it_is_never_negative_and_always_whole(rows, columns):
    assert row_sum_buffer(rows, columns) % 4 == 0
    assert row_sum_buffer(rows, columns) >= 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 768), (4096, 512), (4096, 2048), (8192, 3072), (16384, 96), (999, 6)]
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_takes_as_much(rows, columns, name):
    import torch

    from ampwise.tune.memory.allocation_log import rounded

    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the buffer depends on how many processors a GPU has")
    x = torch.zeros(rows, columns, dtype=getattr(torch, name), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = x.sum(0)
    taken = torch.cuda.max_memory_allocated() - before - rounded(y.nbytes)
    assert abs(taken - row_sum_buffer(rows, columns)) <= MIB + 2 * 2**10  # which is not cut off; and counters
