"""On a GPU with FP8: casts by blocks against their reference, matmuls by cuBLAS and by the kernel against FP64."""

import pytest
import torch
import torch.nn.functional as F

from ampwise.train.float8.block_cast import BLOCK, cast_blocks_reference, cast_to_strips, cast_to_tiles
from ampwise.train.float8.block_check import _multiplies_well, blas_has_blocks, wrong_block_results
from ampwise.train.float8.block_linear import block_linear
from ampwise.train.float8.block_matmul import BLAS_INNER, block_matmul, multiply_blocks_reference

from .test_blocks import uneven
from .test_float8_gpu import codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # what dynamo does itself
    pytest.mark.filterwarnings("ignore:.*script_method"),  # what torch 2.11 says when inductor is loaded
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores"),  # what inductor says of every FP32 product
]

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs FP8 tensor cores", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SHAPES = [(128, 128), (1, 16), (17, 48), (1000, 2064), (4096, 1024)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_the_kernel_casts_as_the_reference_bit_for_bit(shape, wide, tiles, bad):
    x = uneven(*shape).cuda()
    if bad is not None:
        x[-1, shape[1] // 2] = bad
    x = x.to(wide)
    for wanted in ((True, True), (True, False), (False, True)):
        found = (
            cast_to_tiles(x, rows=wanted[0], columns=wanted[1])
            if tiles
            else cast_to_strips(x, rows=wanted[0], columns=wanted[1], sums=True)
        )
        expected = cast_blocks_reference(x, tiles, *wanted)
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            assert torch.equal(codes(ours), codes(theirs))
        for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
            assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        if not tiles and bad is None:
            exact = x.double().sum(0)
            assert ((found.sums.double() - exact).abs() <= x.double().abs().sum(0) * 2.0**-18).all()


def test_the_kernels_pass_the_check_before_training():
    assert wrong_block_results(DEVICE) == ""


def test_the_kernel_multiplies_well_with_each_of_its_tiles(monkeypatch):
    from ampwise.train.float8 import block_kernel

    for tiles in block_kernel.MATMUL_TILES:
        monkeypatch.setattr(block_kernel, "MATMUL_TILES", [tiles])
        # As if cuBLAS had the other sizes: then the kernel runs with the first of its tiles, and measures nothing.
        assert _multiplies_well((272, 400, 656), DEVICE, blas=True), tiles
    monkeypatch.undo()
    assert _multiplies_well((256, 384, 1024), DEVICE, blas=False)


@pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] != 9
    or tuple(map(int, str(torch.version.cuda).split(".")[:2])) < (12, 9),
    reason="cuBLAS has these matmuls on Hopper, from CUDA 12.9 on",
)
def test_cublas_has_them_on_hopper():
    assert _multiplies_well((256, 384, 2 * BLAS_INNER), DEVICE, blas=True)  # what it raises is seen
    assert blas_has_blocks(DEVICE)


@pytest.mark.parametrize("blas", [False, True])
@pytest.mark.parametrize("rows", [8192, 1000, 17, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_near_fp64(blas, rows, bias):
    if blas and not blas_has_blocks(DEVICE):
        pytest.skip("no such matmuls in cuBLAS")
    torch.manual_seed(0)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(1024, 512, device="cuda") * 0.05).requires_grad_()
    b = torch.randn(1024, device="cuda", requires_grad=True) if bias else None
    with torch.autocast("cuda", torch.bfloat16):
        y = block_linear(x, weight, b, blas=blas)
    g = torch.randn_like(y)
    leaves = [each for each in (x, weight, b) if each is not None]
    ours = torch.autograd.grad(y, leaves, g)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = F.linear(*exact)
    theirs = torch.autograd.grad(expected, exact, g.double())
    assert y.dtype == torch.bfloat16
    for found, true in zip((y, *ours), (expected, *theirs), strict=True):
        assert (found.double() - true).norm() <= 0.06 * true.norm()
    for found, leaf in zip(ours, leaves, strict=True):
        assert found.dtype == leaf.dtype


@pytest.mark.parametrize("blas", [False, True])
@pytest.mark.parametrize("rows", [1024, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_by_inductor_it_is_the_same(blas, rows, dtype):
    """Scales are views with strides of their own: torch.compile must hand them on as they are."""
    if blas and not blas_has_blocks(DEVICE):
        pytest.skip("no such matmuls in cuBLAS")
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = uneven(rows, 512).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(1024, 512, device="cuda", dtype=dtype) * 0.05).requires_grad_()
    b = torch.randn(1024, device="cuda", requires_grad=True)
    g = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)

    def layer(x):
        return block_linear(x, weight, b, blas=blas)

    with torch.autocast("cuda", torch.bfloat16):
        found = [[each(x)] for each in (layer, torch.compile(layer, fullgraph=True, dynamic=False))]
    for each in found:
        each += torch.autograd.grad(each[0], (x, weight, b), g)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).float().norm() <= 1e-3 * ours.float().norm()


@pytest.mark.parametrize("tiles", [False, True])
def test_the_matmuls_of_large_sizes_are_those_of_the_reference(tiles):
    """By each way that there is."""
    torch.manual_seed(0)
    a = cast_to_strips(uneven(2048, 8192).cuda(), rows=True, columns=False)
    cast = cast_to_tiles if tiles else cast_to_strips
    b = cast(uneven(1024, 8192, seed=1).cuda(), rows=True, columns=False)
    given = a.rows, b.rows, a.of_rows, b.of_rows
    expected = multiply_blocks_reference(*given, None, torch.float64, tiles, torch.float64)
    for blas in {False, blas_has_blocks(DEVICE)}:
        found = block_matmul(*given, torch.bfloat16, tiles=tiles, blas=blas)
        assert (found.double() - expected).norm() <= 0.004 * expected.norm()
    assert a.of_rows.shape == (8192 // BLOCK, 2048)
