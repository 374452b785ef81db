"""torch.optim.Muon by name, and on BF16 weights, with FP32 weights as the oracle."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampwise import BadInput, Engine, make_optimizer
from ampwise.errors import MissingDependency
from ampwise.train.low_bit.bf16_update import Bf16Update
from ampwise.train.low_bit.pure_bf16 import PureBf16
from ampwise.train.low_bit.rounding import join_bf16_

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
SHAPES = ((16, 32), (40, 8), (64, 64))


def stepped(pure):
    """FP32 weights and BF16 weights after the same 50 steps, and the update of the latter."""
    torch.manual_seed(0)
    narrow = [nn.Parameter((torch.randn(shape) * 0.05).bfloat16()) for shape in SHAPES]
    wide = [nn.Parameter(each.detach().float()) for each in narrow]
    start = [each.detach().clone() for each in wide]
    oracle, muon = (make_optimizer("muon", some, lr=1e-4) for some in (wide, narrow))
    update = Bf16Update(pure)
    for _ in range(50):
        for one, other in zip(wide, narrow, strict=True):
            other.grad = torch.randn(one.shape).bfloat16()
            one.grad = other.grad.float()
        oracle.step()
        with update.around(muon):
            muon.step()
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in muon.state.values())
    return start, wide, narrow, update


def test_with_the_remainders_kept_the_weights_are_those_of_fp32_bit_for_bit():
    _, wide, narrow, update = stepped(PureBf16(kahan=True))
    for one, other in zip(wide, narrow, strict=True):
        whole = other.detach().float()
        join_bf16_(whole, update.rests[other])
        assert torch.equal(whole, one.detach())


def test_rounded_stochastically_the_updates_are_those_of_fp32_on_average():
    """Each is about a hundredth of the gap to the next weight: rounded to nearest, none would change anything."""
    start, wide, narrow, _ = stepped(PureBf16())
    for before, one, other in zip(start, wide, narrow, strict=True):
        right, made = one.detach() - before, other.detach().float() - before
        share = (right * made).sum() / right.square().sum()
        assert share == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure", "bf16-pure,kahan"])
def test_beside_adamw_in_an_engine(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    optimizers = [make_optimizer("muon", matrices, lr=5e-3), make_optimizer("adamw", others, lr=1e-2)]
    engine = Engine(model, optimizers, precision, clip_norm=1.0)
    x = torch.randn(64, 8)
    losses = [engine.step(lambda: F.mse_loss(model(x), x[:, :4])).loss for _ in range(60)]
    assert losses[-1] < 0.35 * losses[0]


def test_what_is_no_matrix_is_refused_in_one_line():
    with pytest.raises(BadInput) as raised:
        make_optimizer("muon", nn.Linear(4, 4))
    text = "expected matrices; 1 of 2 parameters are none, such as one of shape (4,). Give it those with .dim() == 2"
    assert str(raised.value).startswith(f"make_optimizer('muon'): {text}")


def test_a_torch_without_it_says_so(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(MissingDependency, match=r"optimizer 'muon' is torch's, and torch .* lacks it\."):
        make_optimizer("muon", [torch.zeros(2, 2)])
