"""Measuring on the CPU: the C loop against torch operations, and any tensor a user may bring."""

import copy
import math
import pickle

import pytest
import torch

from ampwise import Census, DeviceCensus, census
from ampwise.errors import UnsupportedTensor
from ampwise.numbers.census import cpu
from ampwise.numbers.census.count_row import count_in_torch

from ...for_each import for_each
from .conftest import hard_cases, wild_floats

CASES = hard_cases()


@pytest.mark.parametrize("name", CASES)
def test_the_c_loop_counts_what_the_reference_counts(name, monkeypatch):
    assert cpu._native is not None, "the C loop was not built"
    flat = CASES[name].reshape(-1)
    row, sum_squares = cpu.count_on_cpu(flat)
    expected, expected_sum = count_in_torch(flat.float())
    assert torch.equal(row, expected)
    assert sum_squares == pytest.approx(expected_sum.item(), rel=2e-6, abs=0)
    monkeypatch.setattr(cpu, "_native", None)
    without, _ = cpu.count_on_cpu(flat)
    assert torch.equal(without, expected)


def test_threads_and_ragged_ends_do_not_change_the_count(monkeypatch):
    values = torch.cat([wild_floats(9000), torch.randn(4096 * 3 + 5)])
    expected, _ = count_in_torch(values)
    monkeypatch.setattr(cpu, "SHARE", 1000)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(cpu.count_on_cpu(values)[0], expected)


def test_the_reference_counts_what_python_counts():
    values = wild_floats(500).tolist()
    expected: dict[int, int] = {}
    for value in values:
        if math.isfinite(value) and value:
            mantissa, exponent = math.frexp(abs(value))
            binade = exponent - 2 if mantissa == 0.5 else exponent - 1
            expected[binade] = expected.get(binade, 0) + 1
    assert census(torch.tensor(values, dtype=torch.float32)).binades == expected
    assert census(torch.tensor(values, dtype=torch.float64)).binades == expected


@for_each(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
)  # fmt: skip
def test_every_dtype_is_counted_as_its_exact_values(dtype):
    values = (torch.randn(400) * 3).to(dtype)
    assert census(values) == census(values.double())


def test_float64_reaches_beyond_float32():
    counted = census(torch.tensor([5e-324, 1e-300, 1.7e308, 0.0, math.nan], dtype=torch.float64))
    assert min(counted.binades) == -1075
    assert max(counted.binades) == 1023
    assert (counted.amin, counted.amax, counted.zeros, counted.nans) == (5e-324, 1.7e308, 1, 1)


BASE = torch.arange(24.0).reshape(2, 3, 4) - 5


@pytest.mark.parametrize(
    "view",
    [
        BASE.t() if BASE.dim() == 2 else BASE.permute(2, 0, 1),
        BASE[:, ::2],
        BASE[:, 1:, 1:3],
        BASE.expand(5, 2, 3, 4),
        BASE[0, 0, 0].expand(7),
        BASE.contiguous()[1, 2, 3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.empty_strided((3, 0), (0, 1)),
        torch._neg_view(BASE),
        torch.nn.Parameter(BASE.clone()),
    ],
    ids=["permuted", "strided", "sliced", "expanded", "broadcast", "0-d", "channels-last", "empty", "neg", "param"],
)
@pytest.mark.parametrize("native", [True, False], ids=["C loop", "torch"])
def test_any_strides(view, native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "_native", None)
    assert census(view) == census(view.detach().clone().contiguous().reshape(-1))


def test_the_tensor_is_left_alone():
    tensor = torch.randn(100, requires_grad=True)
    before, version = tensor.detach().clone(), tensor._version
    census(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version


def test_many_tensors_by_name():
    tensors = {"weight": torch.randn(30, 4), "bias": torch.zeros(4), "wide": torch.randn(5).double()}
    counted = census(tensors)
    assert isinstance(counted, DeviceCensus)
    assert list(counted) == list(tensors)
    assert len(counted) == 3
    assert "3 tensors, not fetched" in repr(counted)
    assert {name: counted[name] for name in counted} == {name: census(t) for name, t in tensors.items()}
    assert "fetched" in repr(counted)
    assert counted.total() == sum(counted.values(), Census())
    assert census({}).total() == Census()


def test_merged_by_group():
    counted = census({"a.weight": torch.ones(3), "b.weight": torch.ones(4), "a.bias": torch.zeros(2)})
    assert counted.grouped(lambda name: name[0]) == {
        "a": census(torch.tensor([1, 1, 1, 0, 0.0])),
        "b": counted["b.weight"],
    }


def test_of_a_dtensor_the_local_shard(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(8, 4)
        assert census(DTensor.from_local(whole, mesh, [Shard(0)])) == census(whole)
    finally:
        dist.destroy_process_group()


@for_each(
    ("bad", "message"),
    [
        (torch.ones(2, dtype=torch.int64), "this is torch.int64"),
        (torch.ones(2, dtype=torch.complex64), r"torch.complex64. Count torch.view_as_real\(tensor\)"),
        (torch.ones(2, device="meta"), "meta device: it has a shape but no values"),
        (torch.eye(3).to_sparse(), "zeros are not stored. Count tensor.values"),
        ([1.0], "this is list"),
    ],
)
def test_what_cannot_be_counted(bad, message):
    with pytest.raises(UnsupportedTensor, match=message):
        census(bad)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch before 2.8 has no packed floats")
def test_packed_values_are_refused():
    with pytest.raises(UnsupportedTensor, match=r"packs values into bytes\. Unpack it first"):
        census(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


def _freed():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(10)


def _wrapped():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(10), torch.ones(10))


@for_each("make", [_freed, _fake, _wrapped])
def test_tensors_without_memory_are_refused_before_anyone_reads_address_zero(make):
    with pytest.raises(UnsupportedTensor, match="this has a shape but no memory"):
        census(make())


def test_inside_a_function_transform_there_is_nothing_to_read():
    with pytest.raises(UnsupportedTensor, match="inside a function transform"):
        torch.func.vmap(lambda row: census(row).count)(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_other_layouts_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor, message in (
        (torch.eye(3).to_sparse_csr(), "zeros are not stored"),
        (nested, "nested tensor"),
        (torch.nn.UninitializedParameter(), "not initialised yet"),
    ):
        with pytest.raises(UnsupportedTensor, match=message):
            census(tensor)


def test_a_collective_is_waited_for(tmp_path):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert census(collectives.all_reduce(torch.ones(4), "sum", dist.group.WORLD)).amax == 1.0
    finally:
        dist.destroy_process_group()


def test_a_default_device_does_not_matter():
    with torch.device("meta"):
        assert census(torch.ones(5, device="cpu")).count == 5


def test_results_travel():
    counted = census({"weight": torch.randn(10)})
    assert dict(pickle.loads(pickle.dumps(counted))) == dict(counted)
    assert copy.deepcopy(counted["weight"]) == counted["weight"]


def test_a_missing_gradient_is_named():
    with pytest.raises(UnsupportedTensor, match=r"'head.bias' is NoneType\. Skip parameters without"):
        census({"head.bias": None})
