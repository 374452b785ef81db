"""Reading gradients of every kind, in true units, and noticing when they change. FP64 by hand is the oracle."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampwise import census
from ampwise.errors import BadInput
from ampwise.train.scaler import grad_stats as reading
from ampwise.train.scaler.grad_stats import NormStats, inverse_scale, read_gradients
from ampwise.train.scaler.gradients import collect_gradients

from ...for_each import for_each

HOME = torch.device("cpu")


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sparse(indices, values, size):
    return torch.sparse_coo_tensor(torch.tensor([indices]).long(), torch.tensor(values), (size,), check_invariants=True)


# Each a gradient as autograd or a user may leave it.
GRADIENTS = {
    "ordinary": lambda: rand(5, 7),
    "scalar": lambda: rand(1)[0],
    "empty": lambda: rand(0, 3),
    "transposed": lambda: rand(5, 7).t(),
    "channels last": lambda: rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "gaps": lambda: rand(6, 8)[::2, 1::3],
    "unaligned": lambda: rand(9)[1:],
    "float64": lambda: rand(5, 7, dtype=torch.float64),
    "float64 transposed": lambda: rand(5, 7, dtype=torch.float64).t(),
    "bfloat16": lambda: rand(5, 7, dtype=torch.bfloat16),
    "bfloat16 scalar": lambda: rand(1, dtype=torch.bfloat16)[0],
    "bfloat16 gaps": lambda: rand(6, 8, dtype=torch.bfloat16)[::2, 1::3],
    "sparse": lambda: sparse([1, 4], [3.0, -5.0], 6).coalesce(),
    "sparse, nothing in it": lambda: sparse([], [], 6),
    "complex": lambda: torch.complex(rand(4), rand(4, seed=1)),
    "complex128": lambda: torch.complex(rand(4).double(), rand(4, seed=1).double()),
    "conjugated": lambda: torch.complex(rand(4), rand(4, seed=1)).conj(),
}
WIDE = {"float64", "float64 transposed", "complex128"}  # which nobody counts: there are totals and no census
SCALES = [None, 65536.0, 1000.0]


def holding(*gradients):
    """An optimizer whose parameters have these gradients, None for none."""
    weights = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else torch.zeros_like(gradient.to_dense())
        weights.append(nn.Parameter(like))
        weights[-1].grad = gradient
    return torch.optim.SGD(weights, lr=1.0)


def values_of(gradient):
    """The stored numbers, dense, real and FP64."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.double()


def as_tensor(scale):
    return None if scale is None else torch.tensor(scale)


@for_each("scale", SCALES)
@for_each("name", GRADIENTS)
def test_every_kind_is_read_in_true_units(name, scale):
    gradient = GRADIENTS[name]()
    true = values_of(gradient) / (scale or 1.0)
    found = read_gradients(collect_gradients(holding(gradient)), as_tensor(scale))
    totals = found.totals(HOME)
    assert totals.dtype == torch.float64
    assert totals[0].item() == pytest.approx(true.square().sum().item(), rel=1e-6)
    assert totals[1:].tolist() == [0.0, 0.0]
    counted = found.fetch()
    assert [each.count for each in counted] == [true.numel()] * (name not in WIDE)
    if true.numel() and counted:
        assert counted[0].amax == pytest.approx(true.abs().max().item(), rel=1e-6)


@for_each("name", [name for name in GRADIENTS if "conj" not in name])
def test_reading_leaves_gradients_as_they_are(name):
    gradient = GRADIENTS[name]()
    before = gradient.clone()
    optimizer = holding(gradient)
    read_gradients(collect_gradients(optimizer), torch.tensor(1000.0))
    assert optimizer.param_groups[0]["params"][0].grad is gradient
    assert torch.equal(gradient.to_dense(), before.to_dense())


@for_each("scale", [65536.0, 1000.0])
@for_each("name", GRADIENTS)
def test_unscaling_leaves_in_memory_what_torch_leaves(name, scale):
    ours, theirs = holding(GRADIENTS[name]()), holding(GRADIENTS[name]())
    read_gradients(collect_gradients(ours), torch.tensor(scale), unscale=True)
    found, right = (optimizer.param_groups[0]["params"][0].grad for optimizer in (ours, theirs))
    if right.is_complex():  # torch's kernel takes them as they are, and calls large ones infinite
        right = right.to_dense() * torch.tensor(scale).double().reciprocal().float()
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(1))
        scaler.unscale_(theirs)
    assert found.dtype == right.dtype
    assert torch.equal(found.to_dense(), right.to_dense())


@for_each("value", [math.inf, -math.inf, math.nan])
@for_each("name", [name for name in GRADIENTS if "empty" not in name and "nothing" not in name])
def test_one_bad_element_of_any_kind_is_counted(name, value):
    gradient = GRADIENTS[name]()
    if name == "conjugated":
        gradient = gradient.resolve_conj()
    memory = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    (gradient._values() if gradient.is_sparse else memory)[(-1,) * (1 if gradient.is_sparse else memory.dim())] = value
    gradient = gradient.conj() if name == "conjugated" else gradient
    found = read_gradients(collect_gradients(holding(rand(3), gradient)), torch.tensor(1000.0))
    assert found.totals(HOME)[1:].tolist() == [float(math.isinf(value)), float(math.isnan(value))]
    assert [each.finite for each in found.fetch()] == [True, False][: 2 - (name in WIDE)]


def test_duplicates_in_a_sparse_gradient_add_up_before_they_are_read():
    gradient = sparse([2, 2, 0], [3.0, 4.0, 1.0], 4)
    optimizer = holding(gradient)
    found = read_gradients(collect_gradients(optimizer), None)
    assert found.totals(HOME).tolist() == [50.0, 0.0, 0.0]
    assert optimizer.param_groups[0]["params"][0].grad.is_coalesced()
    overflowing = sparse([2, 2], [3e38, 3e38], 4)
    assert read_gradients(collect_gradients(holding(overflowing)), None).totals(HOME)[1].item() == 1.0


def test_all_kinds_in_one_optimizer_are_read_in_the_order_of_parameters():
    gradients = [make() for make in GRADIENTS.values()]
    optimizer = holding(None, *gradients, None)
    found = read_gradients(collect_gradients(optimizer), None)
    counted = [index for index, name in enumerate(GRADIENTS) if name not in WIDE]
    assert found.parameters == [index + 1 for index in counted]
    assert [each.count for each in found.fetch()] == [values_of(gradients[index]).numel() for index in counted]
    sums = [values_of(gradient).square().sum().item() for gradient in gradients]
    assert found.totals(HOME)[0].item() == pytest.approx(math.fsum(sums), rel=1e-6)
    weights = tuple(2.0**-index for index in range(len(sums)))
    weighted = math.fsum(weight * each for weight, each in zip(weights, sums, strict=True))
    assert found.totals(HOME, weights)[0].item() == pytest.approx(weighted, rel=1e-6)


def test_counts_of_bad_elements_have_no_weight():
    found = read_gradients(collect_gradients(holding(torch.tensor([math.inf, 2.0, math.nan]))), None)
    assert found.totals(HOME, (0.25,)).tolist() == [1.0, 1.0, 1.0]


def test_without_gradients_there_is_nothing_to_read():
    gradients = collect_gradients(holding(None, None))
    found = read_gradients(gradients, torch.tensor(4.0))
    assert (len(gradients), gradients.ordinary, found.parameters, found.fetch()) == (0, False, [], [])
    assert found.totals(HOME).tolist() == found.totals(HOME, ()).tolist() == [0.0, 0.0, 0.0]


def test_ordinary_gradients_are_distinguished_from_others():
    assert collect_gradients(holding(rand(3), rand(2, 2, dtype=torch.bfloat16), None)).ordinary
    for name in ("transposed", "gaps", "float64", "sparse", "complex"):
        assert not collect_gradients(holding(rand(3), GRADIENTS[name]())).ordinary, name


def test_what_is_collected_shares_memory_with_the_gradients():
    for name in ("ordinary", "transposed", "gaps", "float64", "sparse", "complex", "conjugated"):
        optimizer = holding(GRADIENTS[name]())
        for value in collect_gradients(optimizer).values:
            value.zero_()
        assert not optimizer.param_groups[0]["params"][0].grad.to_dense().any(), name


def test_an_object_without_parameters_is_no_optimizer():
    with pytest.raises(BadInput) as error:
        collect_gradients(nn.Linear(1, 1))
    assert str(error.value) == "expected an optimizer; Linear has no param_groups."


CHANGES = {
    "replaced": lambda weight: setattr(weight, "grad", weight.grad.clone()),
    "written to": lambda weight: weight.grad.mul_(2.0),
    "accumulated": lambda weight: weight.grad.add_(weight.grad.clone()),
    "taken away": lambda weight: setattr(weight, "grad", None),
}


@for_each("change", CHANGES)
@for_each("name", [name for name in GRADIENTS if "nothing" not in name])
def test_a_change_to_any_gradient_is_noticed(name, change):
    optimizer = holding(rand(3), GRADIENTS[name]())
    gradients = collect_gradients(optimizer)
    assert gradients.are_unchanged_in(optimizer)
    CHANGES[change](optimizer.param_groups[0]["params"][1])
    assert not gradients.are_unchanged_in(optimizer)


def test_a_gradient_that_appears_is_noticed():
    optimizer = holding(rand(3), None)
    gradients = collect_gradients(optimizer)
    weight = optimizer.param_groups[0]["params"][1]
    weight.grad = torch.zeros_like(weight)
    assert not gradients.are_unchanged_in(optimizer)
    gradients = collect_gradients(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert not gradients.are_unchanged_in(optimizer)


def test_reading_is_no_change_and_unscaling_is_one():
    for name, make in GRADIENTS.items():
        if name != "sparse, nothing in it":
            optimizer = holding(make())
            gradients = collect_gradients(optimizer)
            read_gradients(gradients, torch.tensor(4.0))
            assert gradients.are_unchanged_in(optimizer), name
            read_gradients(gradients, torch.tensor(4.0), unscale=True)
            assert not gradients.are_unchanged_in(optimizer), name


def test_gradients_made_in_inference_mode_are_read():
    with torch.inference_mode():
        optimizer = holding(rand(3))
        assert len(collect_gradients(optimizer)) == 1


def test_the_inverse_goes_through_fp64_as_torchs_does():
    for scale in (3.0, 1000.0, 2.0**120, 1e-30):
        assert inverse_scale(torch.tensor(scale)).item() == (1 / torch.tensor(scale).double()).float().item()


def test_the_census_of_a_reading_is_that_of_the_true_gradients():
    gradients = [rand(50), rand(7, 8).t(), rand(9, dtype=torch.bfloat16)]
    factor = inverse_scale(torch.tensor(1000.0))
    found = read_gradients(collect_gradients(holding(*gradients)), torch.tensor(1000.0)).fetch()
    assert found == [census(gradient.float() * factor) for gradient in gradients]


# Where neither the kernel nor the C loop can read.


@for_each("scale", SCALES)
def test_norms_alone_give_the_same_totals(scale):
    gradients = [rand(50), rand(7, 8).t(), rand(9, dtype=torch.bfloat16), rand(5, dtype=torch.float64)]
    part = NormStats([0, 1, 2, 3], gradients, as_tensor(scale), False)
    squares = [(values_of(gradient) / (scale or 1.0)).square().sum().item() for gradient in gradients]
    assert part.totals(None).dtype == torch.float64
    assert part.totals(None).tolist() == pytest.approx([sum(squares), 0.0, 0.0], rel=1e-6)
    weighted = 0.5 * squares[0] + 0.25 * squares[1] + squares[2] + 2 * squares[3]
    assert part.totals((0.5, 0.25, 1.0, 2.0))[0].item() == pytest.approx(weighted, rel=1e-6)


def test_norms_count_tensors_that_are_not_finite_and_leave_them_out_of_the_sum():
    bad = [torch.tensor([1.0, math.inf]), torch.tensor([math.nan, math.inf]), torch.tensor([3.0])]
    assert NormStats([0, 1, 2], bad, torch.tensor(1.0), False).totals(None).tolist() == [9.0, 1.0, 1.0]


def test_norms_unscale_in_memory_too():
    gradients = [rand(50), rand(7, 8).t()]
    right = [gradient * inverse_scale(torch.tensor(1000.0)) for gradient in gradients]
    NormStats([0, 1], gradients, torch.tensor(1000.0), True)
    assert all(map(torch.equal, gradients, right))


def test_norms_have_no_census():
    part = NormStats([0], [rand(3)], None, False)
    assert (part.counts, part.fetch()) == (False, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_an_empty_gradient_is_zero(dtype):
    assert (
        NormStats([0, 1], [rand(0, dtype=dtype), torch.ones(4, dtype=dtype)], None, False).totals(None)[0].item() == 4.0
    )


def test_large_fp64_gradients_are_finite():
    gradient = torch.tensor([1e200, 1.0], dtype=torch.float64)
    assert read_gradients(collect_gradients(holding(gradient)), None).totals(HOME)[1:].tolist() == [0.0, 0.0]


def test_norms_of_large_finite_gradients_are_finite():
    assert NormStats([0], [torch.full((4,), 1e25)], None, False).totals(None)[1].item() == 0.0


def test_a_device_without_kernels_is_read_by_norms(monkeypatch):
    monkeypatch.setattr(reading, "has_kernels", lambda: False)
    for device, way in (("cuda", NormStats), ("mps", NormStats), ("cpu", reading.HostStats)):
        pretended = SimpleNamespace(device=torch.device(device), dtype=torch.float32, element_size=lambda: 4)
        assert reading._reader(pretended) is way
