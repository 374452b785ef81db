"""The Triton kernel, in Triton's interpreter on a CPU; test_gpu.py runs the same cases for real."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ampwise import census  # noqa: E402
from ampwise.numbers.census.launch import TensorBatch, launch_census, new_buffer, read_census  # noqa: E402

from .conftest import hard_cases  # noqa: E402

# Triton's interpreter computes with numpy, which warns where a GPU would not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted"),
]

CASES = {name: tensor.reshape(-1) for name, tensor in hard_cases().items() if tensor.dtype != torch.float64}
SMALL = {name: tensor for name, tensor in CASES.items() if tensor.numel() < 20_000}


def test_the_kernel_counts_what_the_reference_counts():
    counted = launch_census(list(SMALL.values())).fetch()
    for (name, tensor), found in zip(SMALL.items(), counted, strict=True):
        expected = census(tensor)
        assert found == expected, name
        assert found.sum_squares == pytest.approx(expected.sum_squares, rel=2e-6, abs=0), name


def test_a_tensor_of_several_chunks():
    tensor = CASES["two chunks"]
    assert launch_census([tensor]).fetch() == [census(tensor)]


def test_order_is_kept_across_dtypes_and_empties():
    tensors = [torch.ones(3), torch.ones(5).half(), torch.zeros(0), torch.ones(7).bfloat16(), torch.ones(9)]
    assert [found.count for found in launch_census(tensors).fetch()] == [3, 5, 0, 7, 9]


def test_an_unaligned_view_is_copied_and_an_unread_result_holds_no_gradients():
    tensor = torch.randn(100)[1:]
    batch = TensorBatch([tensor])
    assert all(kept.data_ptr() % 16 == 0 for kept in batch.kept)
    counted = launch_census([tensor])
    assert counted.fetch() == [census(tensor)]
    assert not counted.batch.kept


@pytest.mark.few_by_day(4)
@pytest.mark.parametrize("scale", [1000.0, 1.0, 65536.0, 2.0**120])
def test_gradients_of_a_scaled_loss_are_counted_in_true_units(scale):
    factor = torch.tensor(scale).double().reciprocal().float()
    counted = launch_census(list(SMALL.values()), torch.tensor(scale)).fetch()
    for (name, tensor), found in zip(SMALL.items(), counted, strict=True):
        assert found == census(tensor.float() * factor), name


@pytest.mark.few_by_day(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_read_leaves_them_unscaled_in_memory(dtype):
    wild = torch.cat([CASES["wild bits"], torch.randn(30_000), torch.tensor([1e-40, 0.0])]).to(dtype)
    tensors = [wild, torch.randn(5000).to(dtype), torch.randn(2001).to(dtype)[1:], torch.zeros(0, dtype=dtype)]
    expected = [(tensor.float() * (1 / 1000)).to(dtype) for tensor in tensors]
    counted = launch_census(tensors, torch.tensor(1000.0), write=True).fetch()
    for tensor, right, found in zip(tensors, expected, counted, strict=True):
        assert torch.equal(tensor.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))
        assert found == census(right)


def test_reading_an_empty_buffer():
    batch = TensorBatch([torch.zeros(0), torch.zeros(0)])
    assert [found.count for found in read_census(new_buffer(batch), batch)] == [0, 0]
