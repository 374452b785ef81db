"""Remedies mend: their code, run on what fails, gives numbers and gradients that are finite."""

import math

import pytest
import torch
import torch.nn.functional as F

import ampwise
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import Origin, TensorSummary
from ampwise.trace.remedies import CHANGES, remedies_for

SIGNED = "y = a / torch.where(b.abs() < 1e-12, 1e-12, b)"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def failure(op, dtype, made="inf", precision="fp16", **facts):
    return Failure(origin=Origin(op=op, made=made, dtype=dtype, **({"module": "fc"} | facts)), precision=precision)


def run(code, **names):
    """Its ``y``, after a backward pass."""
    tensors = {name: value.requires_grad_() for name, value in names.items() if isinstance(value, torch.Tensor)}
    scope = {"torch": torch, "F": F, **names, **tensors}
    exec(code, scope)
    scope["y"].sum().backward()
    return scope["y"], [tensor.grad for tensor in tensors.values() if tensor.grad is not None]


def assert_mends(code, **names):
    result, gradients = run(code, **names)
    assert result.isfinite().all(), result
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients), gradients


# What each operation fails at; all of these are mended.
FAILING = {
    "log": [0.0, -1.0, 0.5],
    "log2": [0.0, -1.0, 0.5],
    "log10": [0.0, -1.0, 0.5],
    "log1p": [-1.0, -2.0, 0.5],
    "logit": [0.0, 1.0, 1.5, 0.5],
    "sqrt": [-1.0, 0.0, 0.5],
    "acos": [1.0, -1.0, 1.5, 0.5],
    "asin": [1.0, -1.0, 1.5, 0.5],
    "acosh": [0.5, 1.0, 2.0],
    "atanh": [1.0, -1.0, 1.5],
    "erfinv": [1.0, -1.0, 0.5],
    "special_ndtri": [0.0, 1.0, 0.5],
    "lgamma": [0.0, 0.5],
    "digamma": [0.0, 0.5],
}


def supports(op, dtype):
    function = getattr(torch, op, None) or getattr(torch.special, op.removeprefix("special_"))
    try:
        x = torch.tensor([0.5 if op != "acosh" else 2.0], dtype=dtype, requires_grad=True)
        function(x).sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", FAILING)
def test_arguments_are_clamped_to_where_it_is_defined(op, dtype):
    if not supports(op, DTYPES[dtype]):
        pytest.skip(f"torch has no {op} of {dtype} here")
    (remedy,) = remedies_for(failure(f"aten.{op}.default", dtype, outside_domain=1))
    assert remedy.change == "clamp-argument"
    assert_mends(remedy.code, x=torch.tensor(FAILING[op], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_power_and_what_takes_two_arguments(dtype):
    (power,) = remedies_for(failure("aten.pow.Tensor_Scalar", dtype, "nan", outside_domain=1))
    assert_mends(power.code, x=torch.tensor([-1.0, 0.0, 2.0], dtype=DTYPES[dtype]), exponent=0.5)
    (entropy,) = remedies_for(failure("aten.xlogy.Tensor", dtype, outside_domain=1))
    x, p = torch.tensor([0.5, 0.25], dtype=DTYPES[dtype]), torch.tensor([0.0, 0.5], dtype=DTYPES[dtype])
    assert_mends(entropy.code, x=x, p=p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sqrt", "linalg_vector_norm", "acos", "asin"])
def test_infinite_derivatives(op, dtype):
    facts = {"phase": "backward", "live": False, "derivative_of": op, "exact": "inf"}
    (remedy,) = remedies_for(failure("aten.div.Tensor", dtype, **facts))
    at = [[1.0, -1.0]] if op in ("acos", "asin") else [[0.0, 0.0]]
    assert_mends(remedy.code, x=torch.tensor(at, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_divisors(dtype):
    (remedy,) = remedies_for(failure("aten.div.Tensor", dtype, zero_divisors=1))
    a, b = torch.tensor([0.5, 1e-4], dtype=DTYPES[dtype]), torch.tensor([1.0, 0.0], dtype=DTYPES[dtype])
    result, _ = run(remedy.code, a=a, b=b)
    assert result.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_divisors_stay_negative(dtype):
    both = TensorSummary(dtype=dtype, low=-2.0, high=2.0)
    (remedy,) = remedies_for(failure("aten.div.Tensor", dtype, zero_divisors=1, inputs=(both, both)))
    a, b = torch.tensor([1.0, 1e-4], dtype=DTYPES[dtype]), torch.tensor([-2.0, 0.0], dtype=DTYPES[dtype])
    result, _ = run(remedy.code, a=a, b=b)
    assert result.isfinite().all()
    assert result[0] == -0.5
    assert result.dtype == DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["exp", "expm1", "exp2", "sinh", "cosh"])
def test_exponents(op, dtype):
    (remedy,) = remedies_for(failure(f"aten.{op}.default", dtype, module="", exact="inf"))
    assert remedy.change == "clamp-exponent"
    assert_mends(remedy.code, x=torch.tensor([-300.0, 0.0, 300.0], dtype=DTYPES[dtype]))


def test_rows_that_are_masked_throughout():
    (remedy,) = remedies_for(failure("aten._softmax.default", "fp32", "nan", from_infinities=True))
    scores = torch.tensor([[1.0, -math.inf], [-math.inf, -math.inf]])
    assert_mends(remedy.code, scores=scores)
    shares, _ = run(remedy.code, scores=scores.detach())
    assert shares.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_means_of_nothing():
    (mean,) = remedies_for(failure("aten.mean.default", "fp32", "nan"))
    assert run(mean.code, x=torch.zeros(0))[0] == 0
    (deviation,) = remedies_for(failure("aten.std.correction", "fp32", "nan"))
    assert run(deviation.code, x=torch.ones(1))[0] == 0
    (entropy,) = remedies_for(failure("aten.nll_loss_forward.default", "fp32", "nan"))
    labels = {"labels": torch.tensor([-100, -100])}
    assert run_with(entropy.code, labels, logits=torch.zeros(2, 3)) == 0


def run_with(code, constants, **names):
    scope = {"torch": torch, "F": F, **constants, **names}
    exec(code, scope)
    return scope["y"]


def test_a_module_in_fp32_then_bf16():
    overflow = failure("aten.addmm.default", "fp16", exact="finite", exact_largest=1e5).but(device="cpu")
    first, second = remedies_for(overflow)
    assert (first.change, first.argument) == ("keep", "fc")
    assert (second.change, second.argument) == ("precision", "bf16")
    for remedy in (first, second):
        model = torch.nn.Sequential()
        model.add_module("fc", torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = {"ampwise": ampwise, "torch": torch, "model": model, "optimizer": optimizer}
        exec(remedy.code, scope)
        assert isinstance(scope["engine"], ampwise.Engine)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a'b", "\u202e", "\ud800", "fc"])
def test_names_of_modules_are_quoted(name):
    remedy, _ = remedies_for(failure("aten.addmm.default", "fp16", exact="finite", exact_largest=1e5, module=name))
    with_engine, by_hand = remedy.code.split("\n")
    shown = with_engine.removeprefix("engine = ampwise.Engine(model, optimizer, ")[:-1]
    assert eval(shown, {"ampwise": ampwise}) == ampwise.Policy("fp16").keep("fp32", name)
    assert by_hand == f"{shown}.apply(model)  # in a custom loop"


def test_a_module_kept_in_a_loop_of_ones_own():
    (remedy, _) = remedies_for(failure("aten.addmm.default", "fp16", exact="finite", exact_largest=1e5))
    model = torch.nn.Sequential()
    model.add_module("fc", torch.nn.Linear(4, 4))
    torch.nn.init.constant_(model.fc.weight, 300.0)
    x = torch.full((3, 4), 300.0)
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
    exec(remedy.code.split("\n")[1], {"ampwise": ampwise, "model": model})
    with torch.autocast("cpu", torch.float16):
        assert model(x).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_that_of_the_device(device):
    codes = [
        remedy.code
        for module in ("", "fc")
        for remedy in remedies_for(
            failure("aten.addmm.default", "fp16", exact="finite", exact_largest=1e5, module=module).but(device=device)
        )
    ]
    shown = "".join(codes)
    assert shown.count(f'torch.autocast("{device}"') == shown.count("autocast(") == 3


@pytest.mark.parametrize(
    ("op", "facts", "code"),
    [
        ("aten.div.Tensor", {"inputs": (TensorSummary(dtype="fp32"),)}, "y = a / b.clamp_min(1)"),
        ("aten.remainder.Tensor", {}, "y = a % b.clamp_min(1e-12)  # clamp_min(1) if b is a count"),
        ("aten.reciprocal.default", {"inputs": (TensorSummary(dtype="fp32", low=-1.0, high=1.0),)}, SIGNED),
    ],
)
def test_divisors_of_other_kinds(op, facts, code):
    (remedy,) = remedies_for(failure(op, "fp32", zero_divisors=1, **facts))
    assert remedy.code == code


def test_the_logarithm_of_a_softmax_is_fixed_as_such():
    (remedy,) = remedies_for(failure("aten._log_softmax.default", "fp32", "nan", from_infinities=True))
    shares, _ = run(remedy.code, scores=torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]]))
    assert shares.tolist() == [[pytest.approx(-math.log(2))] * 2, [0.0, 0.0]]


def test_attention_is_fixed_by_its_mask():
    (remedy,) = remedies_for(failure("aten._scaled_dot_product_flash_attention_for_cpu.default", "fp32", "nan"))
    q = torch.ones(1, 2, 4)
    mask = torch.tensor([[True, False], [False, False]])
    result = run_with(remedy.code, {"mask": mask}, q=q, k=q, v=q)
    assert result[0, :, 0].tolist() == [1.0, 0.0]


def test_weights_in_half_are_not_reported_to_use_autocast():
    (remedy,) = remedies_for(failure("aten.addmm.default", "fp16", precision="fp32", exact="finite", exact_largest=1e5))
    assert remedy.change == "clamp-result"
    result, _ = run(remedy.code, y=torch.tensor([math.inf, 1.0], dtype=torch.float16))
    assert result.tolist() == [65504.0, 1.0]


def test_kinds_without_a_remedy():
    assert remedies_for(Failure()) == ()
    assert remedies_for(failure("mine.op.default", "fp16")) == ()
    assert remedies_for(failure("aten.mul.Tensor", "fp32", exact="inf")) == ()


def test_every_change_belongs_to_a_failure():
    facts = [
        ("aten.exp.default", "fp32", {"exact": "inf", "module": ""}),
        ("aten.log.default", "fp32", {"outside_domain": 1}),
        ("aten.addmm.default", "fp16", {"exact": "finite"}),
        ("aten.div.Tensor", "fp32", {"zero_divisors": 1}),
        ("aten._softmax.default", "fp32", {"made": "nan", "from_infinities": True}),
        ("aten.mean.default", "fp32", {"made": "nan"}),
    ]
    found = {
        remedy.change
        for op, dtype, known in facts
        for precision in ("fp16", "fp32")
        for remedy in remedies_for(failure(op, dtype, precision=precision, **known))
    }
    assert found == set(CHANGES)
