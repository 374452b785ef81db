"""Steps on BF16 weights: as on FP32 weights where the rest is kept, whatever the optimizer and however it is cut up."""

import copy

import pytest
import torch
from torch.nn import Parameter

from ampwise.errors import BadInput
from ampwise.train.low_bit import bf16_update as update
from ampwise.train.low_bit.bf16_update import Bf16Update
from ampwise.train.low_bit.pure_bf16 import PureBf16
from ampwise.train.low_bit.rounding import join_bf16_

SHAPES = [(8, 6), (5,), (3, 4, 2, 2), (), (7, 9)]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}


def parameters(dtype=torch.bfloat16, shapes=SHAPES):
    torch.manual_seed(0)
    made = [Parameter(torch.randn(shape).bfloat16().to(dtype)) for shape in shapes]
    return [*made[:2], Parameter(made[2].detach().to(memory_format=torch.channels_last)), *made[3:]]


def groups(made):
    """Of two kinds; one parameter gets no gradient at first."""
    return [{"params": made[:2]}, {"params": made[2:], "weight_decay": 0.1}]


def put_gradients(made, number):
    torch.manual_seed(number)
    for place, parameter in enumerate(made):
        # In the order of the parameter's own memory: torch's fused step on a CPU takes that for granted.
        gradient = torch.empty_like(parameter).copy_(torch.randn(parameter.shape).bfloat16())
        parameter.grad = None if number == 0 and place == 1 else gradient.detach()


def stepped(optimizer, care):
    with care.around(optimizer):
        optimizer.step()


@pytest.fixture(params=[40, 10**6])
def chunk(request, monkeypatch):
    monkeypatch.setattr(update, "CHUNK", request.param)


@pytest.mark.half_by_day
@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_the_rest_kept_it_is_training_with_fp32_weights(name):
    """To the bit, with the same gradients."""
    wide, narrow, care = parameters(torch.float32), parameters(), Bf16Update(PureBf16(kahan=True))
    oracle, ours = OPTIMIZERS[name](groups(wide)), OPTIMIZERS[name](groups(narrow))
    for number in range(12):
        put_gradients(wide, number)
        put_gradients(narrow, number)
        oracle.step()
        stepped(ours, care)
    for one, other in zip(wide, narrow, strict=True):
        assert other.dtype == torch.bfloat16
        assert torch.equal(join_bf16_(other.detach().float(), care.rests[other]), one)
        assert not torch.equal(other.float(), one)
        for key, value in oracle.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours.state[other][key])), key
    assert list(ours.state) == [each for each in narrow if each in ours.state]


@pytest.mark.usefixtures("chunk")
def test_by_chance_it_is_so_on_average():
    shapes = [(64, 64), (5,), (3, 4, 2, 2), (64, 64)]
    wide, narrow, care = (
        parameters(torch.float32, shapes),
        parameters(shapes=shapes),
        Bf16Update(PureBf16(bf16_states=True)),
    )
    oracle, ours = OPTIMIZERS["fused"](wide), OPTIMIZERS["fused"](narrow)
    plain = parameters(shapes=shapes)
    lossy = OPTIMIZERS["fused"](plain)
    start = wide[0].detach().clone()
    for number in range(1, 40):
        for made in (wide, narrow, plain):
            put_gradients(made, number)
        oracle.step()
        lossy.step()
        stepped(ours, care)
    moved, ours_moved = (wide[0] - start).detach(), (narrow[0].float() - start).detach()
    # Of what FP32 has moved, the share that is there: all of it, but for noise; without it, a part has vanished.
    share = float((ours_moved * moved).sum() / moved.square().sum())
    lost = float(((plain[0].detach().float() - start) * moved).sum() / moved.square().sum())
    assert share == pytest.approx(1.0, abs=0.05)
    assert abs(lost - 1) > 2 * abs(share - 1)
    state = ours.state[narrow[0]]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16
    }  # fmt: skip
    true = oracle.state[wide[0]]["exp_avg_sq"]
    assert float(state["exp_avg_sq"].double().mean()) == pytest.approx(float(true.double().mean()), rel=0.01)


def test_a_long_average_in_bf16_is_without_bias():
    """With beta 0.999, a step moves it by less than half of BF16's: to nearest it would stand still."""
    narrow, care = [Parameter(torch.ones(4096, dtype=torch.bfloat16))], Bf16Update(PureBf16(bf16_states=True))
    optimizer = torch.optim.Adam(narrow, lr=0.0, betas=(0.9, 0.999))
    for number in range(60):
        narrow[0].grad = torch.full((4096,), 1.0 if number < 10 else 0.5, dtype=torch.bfloat16)
        stepped(optimizer, care)
    expected = 0.0
    for number in range(60):
        expected = 0.999 * expected + 0.001 * (1.0 if number < 10 else 0.25)
    assert float(optimizer.state[narrow[0]]["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=0.005)


def test_parameters_keep_their_memory_and_state_has_its_own_again():
    narrow, care = parameters(), Bf16Update(PureBf16())
    optimizer = OPTIMIZERS["fused"](groups(narrow))
    before = [each.data_ptr() for each in narrow]
    put_gradients(narrow, 1)
    gradients = [each.grad for each in narrow]
    lists = [group["params"] for group in optimizer.param_groups]
    stepped(optimizer, care)
    assert [each.data_ptr() for each in narrow] == before
    assert all(each.grad is one for each, one in zip(narrow, gradients, strict=True))
    assert all(group["params"] is one for group, one in zip(optimizer.param_groups, lists, strict=True))
    assert set(optimizer.state) == set(narrow)
    assert "step" not in vars(optimizer)


def test_hooks_have_their_turn_once_and_see_the_parameters_themselves(monkeypatch):
    monkeypatch.setattr(update, "CHUNK", 1)
    narrow, seen = parameters(), []
    optimizer = OPTIMIZERS["adamw"](groups(narrow))
    optimizer.register_step_pre_hook(lambda own, args, kwargs: seen.append(own.param_groups[0]["params"]))
    optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append(own.param_groups[0]["params"]))
    put_gradients(narrow, 1)
    stepped(optimizer, Bf16Update(PureBf16()))
    assert [each[0] is narrow[0] for each in seen] == [True, True]
    assert len(seen[0]) == 2


class Counting(torch.optim.Optimizer):
    """Not torch's own: it counts its calls, looks at all parameters together, and replaces their data."""

    def __init__(self, made):
        super().__init__(made, {"lr": 2.0**-10, "count": 0})
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            self.seen.append(len(group["params"]))
            norm = sum(float(each.grad.float().square().sum()) for each in group["params"]) ** 0.5
            for each in group["params"]:
                each.data = each.data - group["lr"] * each.grad / norm


def test_an_optimizer_that_is_not_torchs_has_all_parameters_at_once(monkeypatch):
    monkeypatch.setattr(update, "CHUNK", 1)
    wide, narrow, care = parameters(torch.float32), parameters(), Bf16Update(PureBf16(kahan=True))
    oracle, ours = Counting(wide), Counting(narrow)
    for number in (1, 2):
        put_gradients(wide, number)
        put_gradients(narrow, number)
        oracle.step()
        stepped(ours, care)
    assert ours.seen == [5, 5]
    assert ours.param_groups[0]["count"] == 2
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(join_bf16_(other.detach().float(), care.rests[other]), one)
    told = Counting(narrow)
    stepped(told, Bf16Update(PureBf16(elementwise=True)))
    assert told.seen == [1] * 5


def test_fp32_parameters_among_them_are_stepped_as_they_are():
    made = [Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.bfloat16))]
    twin = copy.deepcopy(made[0])
    optimizer, oracle = OPTIMIZERS["fused"](made), OPTIMIZERS["fused"]([twin])
    for each in (*made, twin):
        each.grad = torch.ones_like(each)
    stepped(optimizer, Bf16Update(PureBf16()))
    oracle.step()
    assert torch.equal(made[0], twin)
    assert set(optimizer.state) == set(made)


def test_a_step_that_fails_leaves_weights_and_lists():
    narrow = parameters()
    optimizer = OPTIMIZERS["adamw"](groups(narrow))
    put_gradients(narrow, 1)
    stepped(optimizer, Bf16Update(PureBf16()))
    before = copy.deepcopy([narrow, optimizer.state_dict()])
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        stepped(optimizer, Bf16Update(PureBf16()))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert all(torch.equal(one, other) for one, other in zip(narrow, before[0], strict=True))
    assert set(optimizer.state) == set(narrow)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


def test_what_is_refused():
    narrow = parameters()
    optimizer = OPTIMIZERS["sgd"](narrow)
    put_gradients(narrow, 1)
    care = Bf16Update(PureBf16())
    with pytest.raises(BadInput, match=r"bf16-pure: step\(\) takes no closure"), care.around(optimizer):
        optimizer.step(lambda: 0)
    narrow[0].grad = narrow[0].grad.to_sparse()
    with pytest.raises(
        BadInput, match=r"a parameter of shape \(8, 6\) has a sparse gradient. Create its embedding with"
    ):
        stepped(optimizer, care)
    optimizer.step = lambda: None
    with pytest.raises(BadInput, match=r"the step method of this SGD was replaced.* Use register_step_pre_hook"):
        stepped(optimizer, care)
