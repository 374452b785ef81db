"""A linear layer in FP8 against the same written out by hand, and against FP64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ampwise.errors import BadInput
from ampwise.train.float8 import fp8_linear as product
from ampwise.train.float8.fp8_cast import E4M3, E5M2, LIMITS, TOPS, cast_to_fp8, scales_of
from ampwise.train.float8.fp8_linear import fp8_linear

from ...for_each import for_each

IN, OUT = 48, 32


def rounded(x, dtype, scale=None):
    scale = scales_of(x.abs().max(), TOPS[dtype]) if scale is None else scale
    limit = LIMITS[dtype]
    return (x.float() * scale).clamp(-limit, limit).to(dtype).float() / scale


def operands(shape=(5, 7, IN), bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator).requires_grad_()

    return normal(*shape), normal(OUT, IN), normal(OUT) if bias else None


def gradients(y, leaves, g):
    return torch.autograd.grad(y, [each for each in leaves if each is not None], g)


@for_each("shape", [(IN,), (1, IN), (5, IN), (5, 7, IN), (2, 3, 4, IN)])
@for_each("bias", [True, False])
@for_each("e5m2", [True, False])
@for_each("delayed", [True, False])
def test_three_products_of_rounded_operands(shape, bias, e5m2, delayed):
    x, weight, b = leaves = operands(shape, bias)
    scales = torch.tensor([8.0, 256.0, 64.0]) if delayed else None
    y = fp8_linear(x, weight, b, scales, None, e5m2)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    g_dtype = E5M2 if e5m2 else E4M3
    by = [None] * 3 if scales is None else scales
    x8, w8 = rounded(x.detach(), E4M3, by[0]), rounded(weight.detach(), E4M3, by[1])
    g8 = rounded(g, g_dtype, by[2]).reshape(-1, OUT)
    torch.testing.assert_close(y, x8 @ w8.T + (0 if b is None else b.detach()), rtol=1e-5, atol=1e-5)
    found = gradients(y, leaves, g)
    torch.testing.assert_close(found[0].reshape(-1, IN), g8 @ w8, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[1], g8.T @ x8.reshape(-1, IN), rtol=1e-5, atol=1e-4)
    if bias:
        torch.testing.assert_close(found[2], g.reshape(-1, OUT).sum(0))


@for_each("narrow", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_each_matmul_is_in_fp8_or_in_16_bits_by_itself(narrow, dtype):
    x, weight, b = leaves = operands()
    g = torch.randn(5, 7, OUT, generator=torch.Generator().manual_seed(1), dtype=dtype)

    def run(layer):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = layer(x, weight, b)
        return y.detach(), *gradients(y, leaves, g)

    wide, all_narrow = run(F.linear), run(lambda *given: fp8_linear(*given, None, None, True))
    found = run(lambda *given: fp8_linear(*given, None, None, True, *narrow))
    for is_narrow, ours, by_fp8, plain in zip(narrow, found, all_narrow, wide, strict=False):
        torch.testing.assert_close(ours, by_fp8 if is_narrow else plain)
        assert not torch.allclose(by_fp8, plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[3], wide[3], rtol=1e-2, atol=1e-2)


@for_each("e5m2", [True, False])
@for_each("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_torch_where_it_has_one_for_cpus(e5m2, dtype):
    a, b = operands((48, IN), bias=False)[:2]
    a8 = cast_to_fp8(a.detach(), None, e5m2=e5m2, rows=True, columns=False)
    b8 = cast_to_fp8(b.detach(), None, e5m2=False, rows=True, columns=False)
    try:
        expected = torch._scaled_mm(a8.rows, b8.rows.t(), a8.inverse, b8.inverse, out_dtype=dtype)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torch {torch.__version__}: {error}".partition("\n")[0])
    found = product.scaled_matmul(a8.rows, b8.rows, a8.inverse, b8.inverse, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_frozen_weight_or_input_takes_no_matmul_and_saves_nothing():
    x, weight, b = operands()
    for narrow in ((True, True, True), (False, True, True), (True, False, False)):
        for given in ((x.detach(), weight, b), (x, weight.detach(), b)):
            fp8_linear(*given, None, None, True, *narrow).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None


def test_it_is_near_fp64():
    x, weight, b = leaves = operands((64, IN))
    y = fp8_linear(x, weight, b, None, None, True)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = F.linear(*exact)
    g = torch.randn_like(y)
    for ours, theirs in zip(
        (y, *gradients(y, leaves, g)), (expected, *gradients(expected, exact, g.double())), strict=True
    ):
        assert (ours - theirs).norm() <= 0.08 * theirs.norm()


def test_under_autocast_the_output_is_bf16_and_gradients_have_the_types_of_the_leaves():
    x, weight, b = leaves = operands()
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, weight, b, None, None, True)
        y16 = fp8_linear(x.bfloat16(), weight, b, None, None, True)
    assert y.dtype == y16.dtype == torch.bfloat16
    assert [each.dtype for each in gradients(y, leaves, torch.ones_like(y))] == [torch.float32] * 3
    assert fp8_linear(x.bfloat16(), weight, b, None, None, True).dtype == torch.bfloat16


@for_each("frozen", ["x", "weight", "both"])
def test_parts_that_need_no_gradient_get_none(frozen):
    x, weight, b = operands()
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    y = fp8_linear(x, weight, b, None, None, True)
    y.sum().backward()
    assert (x.grad is None) is (frozen != "weight")
    assert (weight.grad is None) is (frozen != "x")
    assert b.grad.tolist() == [35.0] * OUT


def test_without_gradients_nothing_is_kept(monkeypatch):
    x, weight, b = operands()
    kept, real = [], product.cast_to_fp8

    def noted(x, number, *, columns, **kwargs):
        assert not columns, "which only a backward pass needs"
        return real(x, number, columns=columns, **kwargs)

    monkeypatch.setattr(product, "cast_to_fp8", noted)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_linear(x, weight, b, None, None, True)
    assert not kept


def test_what_is_kept_for_the_backward_pass_takes_a_byte_each():
    x, weight, b = operands((64, IN))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_linear(x, weight, b, None, None, True)
    assert sum(each.nbytes for each in kept) <= x.numel() + weight.numel() + 64


@pytest.mark.parametrize("shape", [(0, IN), (3, 0, IN)])
def test_nothing_in_nothing_out(shape):
    x, weight, b = leaves = operands(shape)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, weight, b, None, None, True)
    assert y.shape == (*shape[:-1], OUT)
    found = gradients(y, leaves, torch.ones_like(y))
    assert [each.shape for each in found] == [x.shape, weight.shape, b.shape]
    assert not found[1].any()


@pytest.mark.parametrize("place", ["x", "weight", "gradient"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("delayed", [True, False])
def test_what_is_not_finite_reaches_a_gradient(place, bad, delayed):
    """So that the step is skipped."""
    x, weight, b = operands()
    g = torch.ones(5, 7, OUT)
    with torch.no_grad():
        {"x": x, "weight": weight, "gradient": g}[place][0, 0] = bad
    y = fp8_linear(x, weight, b, torch.ones(3) if delayed else None, None, True)
    found = gradients(y, (x, weight), g)
    assert not all(each.isfinite().all() for each in found)


def test_the_slot_gets_what_was_seen():
    x, weight, b = operands()
    slot = torch.zeros(3, 2, requires_grad=True)
    scales = torch.tensor([256.0, 1.0, 1.0])
    g = torch.randn(5, 7, OUT)
    fp8_linear(x, weight, b, scales, slot, True).backward(g)
    assert slot.grad[:, 0].tolist() == [each.detach().abs().max().item() for each in (x, weight, g)]
    assert slot.grad[:, 1].tolist() == [float((x.abs() * 256 > 448).sum()), 0, 0]
    assert slot.grad[0, 1] > 0


@pytest.mark.half_by_day
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
@pytest.mark.parametrize("delayed", [True, False])
def test_compiled_it_is_the_same(delayed):
    compiled = torch.compile(fp8_linear, fullgraph=True, backend="aot_eager")
    x, weight, b = operands()
    scales = torch.tensor([64.0, 64.0, 1024.0]) if delayed else None
    slot = torch.zeros(3, 2, requires_grad=True) if delayed else None
    leaves = [x, weight, b, *([slot] if delayed else [])]
    g = torch.randn(5, 7, OUT)
    found = []
    for each in (fp8_linear, compiled):
        y = each(x, weight, b, scales, slot, True)
        found.append([y, *torch.autograd.grad(y, leaves, g)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_checkpointed_it_is_the_same():
    x, weight, b = leaves = operands()
    g = torch.randn(5, 7, OUT)
    found = []
    for run in (lambda f, *args: f(*args), lambda f, *args: checkpoint(f, *args, use_reentrant=False)):
        y = run(fp8_linear, x, weight, b, None, None, True)
        found.append([y, *gradients(y, leaves, g)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_second_derivative_is_refused():
    x, weight, b = operands()
    y = fp8_linear(x, weight, b, None, None, True).square().sum()
    with pytest.raises(BadInput, match=r"create_graph=True\) through an FP8 layer: .* Keep the layers .* BF16"):
        torch.autograd.grad(y, x, create_graph=True)
