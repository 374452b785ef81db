"""A scale for each block: casts, matmuls and the layer against the same written out; kernels in the interpreter."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ampwise.errors import BadInput
from ampwise.train.float8.block_cast import BLOCK, cast_blocks_reference, cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_linear import block_linear
from ampwise.train.float8.block_matmul import block_matmul, multiply_blocks_reference
from ampwise.train.float8.fp8_cast import E4M3, LIMITS, TOPS, scales_of
from ampwise.train.float8.fp8_linear import fp8_linear

from ...for_each import for_each

IN, OUT = 160, 144  # a block and a part of one


def uneven(*shape, seed=0):
    """Magnitudes that differ from row to row, and from column to column."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(-(torch.arange(shape[-2]) % 13).float()).unsqueeze(1)
    columns = torch.exp2((torch.arange(shape[-1]) % 5).float())
    return torch.randn(*shape, generator=generator) * rows * columns


def rounded(x, height, width):
    """What a matrix is after a cast by blocks, written out as loops."""
    found = torch.empty_like(x, dtype=torch.float32)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            place = slice(top, top + height), slice(left, left + width)
            scale = scales_of(x[place].abs().max().float(), TOPS[E4M3])
            found[place] = (x[place].float() * scale).clamp(-LIMITS[E4M3], LIMITS[E4M3]).to(E4M3).float() / scale
    return found


def undone(codes, inverses, height):
    """FP8 values with their scales undone."""
    spread = inverses.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


@for_each("shape", [(5, 16), (130, 144)])
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_each_block_is_cast_with_a_scale_of_its_own(shape, dtype):
    x = uneven(*shape).to(dtype)
    strips, tiles = cast_to_strips(x, rows=True, columns=True, sums=True), cast_to_tiles(x, rows=True, columns=True)
    assert torch.equal(undone(strips.rows, strips.of_rows.t(), 1), rounded(x, 1, BLOCK))
    standing = undone(strips.columns, strips.of_columns.t(), 1)
    assert standing.shape == (shape[1], -(-shape[0] // BLOCK) * BLOCK)
    assert torch.equal(standing[:, : shape[0]], rounded(x.t(), 1, BLOCK))
    assert not standing[:, shape[0] :].any()
    assert torch.equal(undone(tiles.rows, tiles.of_rows, BLOCK), rounded(x, BLOCK, BLOCK))
    assert torch.equal(undone(tiles.columns, tiles.of_columns, BLOCK), rounded(x.t(), BLOCK, BLOCK))
    torch.testing.assert_close(strips.sums, x.float().sum(0))
    assert all(each.is_contiguous() for each in (*strips, *tiles))


def test_what_is_not_wanted_is_not_made():
    x = torch.ones(16, 32)
    for cast in (cast_to_strips, cast_to_tiles):
        assert not cast(x, rows=False, columns=True).rows.numel()
        assert not cast(x, rows=True, columns=False).columns.numel()
    assert not cast_to_strips(x, rows=True, columns=True).sums.numel()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_in_its_block_alone(bad):
    x = torch.ones(256, 256)
    x[3, 130] = bad
    strips, tiles = cast_to_strips(x, rows=True, columns=True), cast_to_tiles(x, rows=True, columns=True)
    assert strips.of_rows.isnan().nonzero().tolist() == [[1, 3]]
    assert strips.rows.float().isnan().nonzero()[:, 1].tolist() == [*range(128, 256)]
    assert strips.of_columns.isnan().nonzero().tolist() == [[0, 130]]
    assert tiles.of_rows.isnan().nonzero().tolist() == [[0, 1]]
    assert tiles.of_columns.isnan().nonzero().tolist() == [[1, 0]]


def exact(shape):
    """Values that E4M3 holds at any scale that fits, with other largest ones in each row and column.

    Triton's interpreter rounds otherwise than a GPU.
    """
    rows, columns = (126 - 8 * (torch.arange(size) % 7) for size in shape)
    magnitudes = torch.randint(0, 127, shape).minimum(rows.unsqueeze(1)).minimum(columns.unsqueeze(0))
    return magnitudes.to(torch.uint8).view(E4M3).float() * torch.randint(0, 2, shape).mul(2).sub(1) / 64


@pytest.mark.parametrize("shape", [(130, 144), (3, 48)])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_the_kernel_casts_as_the_reference_does(shape, tiles, dtype, bad):
    launch = pytest.importorskip("ampwise.train.float8.block_kernel").launch_cast_blocks
    torch.manual_seed(0)
    x = exact(shape).to(dtype)
    x[0, 0] = -0.0
    if bad is not None:
        x[-1, -1] = bad
    for wanted in ((True, True), (True, False), (False, True)):
        found, expected = (each(x, tiles, *wanted, not tiles) for each in (launch, cast_blocks_reference))
        if bad is None:  # of NaN the interpreter makes numbers
            for ours, theirs in zip(found[:2], expected[:2], strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
            assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        torch.testing.assert_close(found[4], expected[4], equal_nan=True)


@pytest.mark.parametrize("sizes", [(130, 144, 160), (16, 256, 256)])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_multiplies_as_the_reference_does(sizes, tiles, bias, dtype):
    launch = pytest.importorskip("ampwise.train.float8.block_kernel").launch_multiply
    height, width, inner = sizes
    a = cast_to_strips(uneven(height, inner), rows=True, columns=False)
    b = (cast_to_tiles if tiles else cast_to_strips)(uneven(width, inner, seed=1), rows=True, columns=False)
    given = (a.rows, b.rows, a.of_rows, b.of_rows, torch.randn(width).bfloat16() if bias else None, dtype, tiles)
    for tuned in (False, True):
        torch.testing.assert_close(launch(*given, tuned), multiply_blocks_reference(*given), rtol=1e-2, atol=1e-3)


def test_the_product_is_of_the_values_with_their_scales_undone():
    x, y = uneven(40, IN), uneven(OUT, IN, seed=1)
    a = cast_to_strips(x, rows=True, columns=False)
    for tiles, cast in ((True, cast_to_tiles), (False, cast_to_strips)):
        b = cast(y, rows=True, columns=False)
        found = block_matmul(a.rows, b.rows, a.of_rows, b.of_rows, torch.float32, tiles=tiles, blas=True)
        expected = rounded(x, 1, BLOCK) @ rounded(y, BLOCK if tiles else 1, BLOCK).t()
        torch.testing.assert_close(found, expected)


def operands(shape=(5, 30, IN), bias=True):
    given = uneven(*shape), uneven(OUT, IN, seed=1) * 0.1, torch.randn(OUT) if bias else None
    return [None if each is None else each.requires_grad_() for each in given]


def results(layer, leaves, g):
    y = layer(*leaves)
    return y.detach(), *torch.autograd.grad(y, [each for each in leaves if each is not None], g)


def by_blocks(*given):
    return block_linear(*given, blas=False)


@for_each("shape", [(1, IN), (5, 30, IN)])
@for_each("bias", [True, False])
def test_the_layer_is_three_products_of_rounded_operands(shape, bias):
    x, weight, b = leaves = operands(shape, bias)
    g = uneven(math.prod(shape[:-1]), OUT, seed=2).reshape(*shape[:-1], OUT)
    y, of_x, of_weight, *of_bias = results(by_blocks, leaves, g)
    matrix, gradient, wide = x.detach().reshape(-1, IN), g.reshape(-1, OUT), weight.detach()
    tiles = rounded(wide, BLOCK, BLOCK)
    expected = rounded(matrix, 1, BLOCK) @ tiles.t() + (0 if b is None else b.detach())
    torch.testing.assert_close(y.reshape(-1, OUT), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_x.reshape(-1, IN), rounded(gradient, 1, BLOCK) @ tiles, rtol=1e-4, atol=1e-4)
    expected = rounded(gradient.t(), 1, BLOCK) @ rounded(matrix.t(), 1, BLOCK).t()
    torch.testing.assert_close(of_weight, expected, rtol=1e-4, atol=1e-4)
    if bias:
        torch.testing.assert_close(of_bias[0], gradient.sum(0))


def test_rows_far_below_others_keep_their_precision():
    """Which a scale for the whole tensor flushes to zero."""
    x, weight = torch.randn(256, 128), torch.randn(128, 128) / 12
    x[128:] *= 2.0**-30
    exact = F.linear(x, weight)
    blocks, whole = by_blocks(x, weight, None), fp8_linear(x, weight, None, None, None, True)
    assert not whole[128:].any()
    assert (blocks - exact)[128:].norm() <= 0.06 * exact[128:].norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what dynamo does itself
def test_checkpointed_and_compiled_it_is_the_same():
    leaves, g = operands(), uneven(5, 30, OUT, seed=2)
    plain = results(by_blocks, leaves, g)
    for layer in (
        lambda *given: checkpoint(by_blocks, *given, use_reentrant=False),
        torch.compile(by_blocks, fullgraph=True, backend="aot_eager"),
    ):
        assert all(torch.equal(*pair) for pair in zip(results(layer, leaves, g), plain, strict=True))
    torch._dynamo.reset()


def test_what_is_frozen_takes_no_matmul_and_saves_nothing():
    x, weight, b = operands()
    for given in ((x.detach(), weight, b), (x, weight.detach(), b), (x.detach(), weight.detach(), b)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = by_blocks(*given)
        y.sum().backward()
        needed = (weight.numel() if given[0].requires_grad else 0) + (256 * IN if given[1].requires_grad else 0)
        assert needed <= sum(each.nbytes for each in kept) <= 1.1 * needed
    assert all(each.grad is not None for each in (x, weight, b))


@pytest.mark.parametrize("shape", [(0, IN), (3, 0, IN)])
def test_nothing_in_nothing_out(shape):
    leaves = operands(shape)
    y, *found = results(by_blocks, leaves, torch.ones(*shape[:-1], OUT))
    assert y.shape == (*shape[:-1], OUT)
    assert [each.shape for each in found] == [each.shape for each in leaves]
    assert not found[1].any()


def test_a_second_derivative_is_refused():
    x, weight, _ = operands()
    y = by_blocks(x, weight, None).square().sum()
    with pytest.raises(BadInput, match=r"create_graph=True\) through an FP8 layer"):
        torch.autograd.grad(y, x, create_graph=True)
