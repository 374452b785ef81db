"""What layers lose, counted: against the casts that torchao really makes."""

import pytest
import torch
from torch import nn

from ampwise.train.float8.backends import make_forward
from ampwise.train.float8.delayed_scaling import OPERANDS
from ampwise.train.float8.layer_forward import install_forward, remove_forward
from ampwise.train.float8.operand_census import WITH_SCALES, CountingForward, report_layers
from ampwise.train.float8.recipe import ALL_E4M3, BY_ROW, Fp8

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # what torch says of a CPU without BF16


def spread(*shape, octaves=24):
    """Magnitudes that differ by more than E4M3 holds, in rows and in columns, and some zeros."""
    numbers = torch.randn(shape) * torch.exp2(torch.randint(-octaves, 1, shape).float())
    return numbers.where(torch.rand(shape) > 0.1, torch.zeros(()))


def sampled(fp8, xs, gradients):
    """The report of a layer that was given these, one micro-batch after the other, and the layer."""
    torch.manual_seed(0)
    module, sample = nn.Linear(48, 32), {}
    with torch.no_grad():
        module.weight.copy_(spread(32, 48))
    install_forward(module, CountingForward(make_forward(module, fp8), fp8, sample))
    for x, gradient in zip(xs, gradients, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.backward(gradient.to(out.dtype))
    remove_forward(module)
    report = report_layers({"a": fp8}, {"a": sample}, None, 1)
    return {each.operand: each for each in report.operands}, module


@pytest.mark.parametrize("recipe", BY_ROW)
def test_by_row_it_is_what_torchaos_casts_make_zero(monkeypatch, recipe):
    pytest.importorskip("torchao")
    from torchao.float8 import float8_linear

    lost = {}
    real = float8_linear.hp_tensor_to_float8_dynamic

    def noted(tensor, dtype, *args, gemm_input_role, **kwargs):
        cast = real(tensor, dtype, *args, gemm_input_role=gemm_input_role, **kwargs)
        assert dtype is torch.float8_e4m3fn
        zero = (cast._data.float() == 0) & (tensor != 0)
        lost.setdefault(gemm_input_role.value, []).append((zero.sum() / (tensor != 0).sum()).item())
        return cast

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", noted)
    torch.manual_seed(1)
    found, _ = sampled(Fp8(recipe), [spread(16, 48).requires_grad_()], [spread(16, 32)])
    for operand, role in zip(OPERANDS, ("input", "weight", "grad_output"), strict=True):
        assert found[operand].flushed_share == pytest.approx(max(lost[role]), abs=1e-6)
        assert 0.05 < found[operand].flushed_share < 0.95
        assert (found[operand].scale, found[operand].fmt) == (None, "e4m3")


def test_recipes_with_scales_for_parts_are_those_that_are_counted_so():
    assert set(WITH_SCALES) == set(ALL_E4M3)


def test_by_blocks_it_is_what_the_casts_make_zero(monkeypatch):
    from ampwise.train.float8 import block_linear

    lost = []

    def noting(cast):
        def noted(x, **wanted):
            found = cast(x, **wanted)
            shares = [((found.rows.float() == 0) & (x != 0)).sum() / (x != 0).sum()]
            if wanted["columns"]:
                standing = found.columns[:, : x.shape[0]].float()
                shares.append(((standing == 0) & (x.t() != 0)).sum() / (x != 0).sum())
            lost.append(max(shares).item())
            return found

        return noted

    for name in ("cast_to_strips", "cast_to_tiles"):
        monkeypatch.setattr(block_linear, name, noting(getattr(block_linear, name)))
    torch.manual_seed(1)
    found, _ = sampled(Fp8("block"), [spread(16, 48).requires_grad_()], [spread(16, 32)])
    for operand, share in zip(OPERANDS, lost, strict=True):
        assert found[operand].flushed_share == pytest.approx(share, abs=1e-6)
        assert 0.05 < found[operand].flushed_share < 0.95
        assert (found[operand].scale, found[operand].fmt) == (None, "e4m3")


def test_by_row_less_is_lost_than_with_one_scale():
    pytest.importorskip("torchao")
    x = torch.ones(16, 48) * torch.exp2(-2.0 * torch.arange(16)).unsqueeze(1)  # each row is even in itself
    gradient = torch.ones(16, 32)
    one, _ = sampled(Fp8(), [x], [gradient])
    rows, _ = sampled(Fp8("rowwise+hp-weight-grad"), [x], [gradient])
    assert one["input"].flushed_share == 0.4375  # 2**-18 and less, beside 1
    assert rows["input"].flushed_share == 0.0
    both, _ = sampled(Fp8("rowwise"), [x], [gradient])
    assert both["input"].flushed_share == 0.4375  # in columns, for the weight's gradient


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_micro_batches_add_up(recipe):
    if recipe == "rowwise":
        pytest.importorskip("torchao")
    small, large = torch.full((16, 48), 2.0**-30), torch.ones(16, 48)
    found, module = sampled(Fp8(recipe), [small, large], [torch.ones(16, 32)] * 2)
    assert found["input"].amaxes == (1.0,)
    assert found["input"].flushed_share == (0.5 if recipe == "current" else 0.0)
    assert found["weight"].amaxes == (module.weight.abs().max().item(),)


def test_what_is_not_finite_or_nothing_at_all():
    found, _ = sampled(Fp8(), [torch.zeros(16, 48)], [torch.full((16, 32), torch.inf)])
    assert found["input"].flushed_share is None
    assert found["gradient"].flushed_share is None
    assert found["gradient"].scale is None
