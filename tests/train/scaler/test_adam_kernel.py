"""Our Adam against torch's own, in float64, in Triton's interpreter; test_gpu.py runs it for real."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from ampwise.train.scaler import optimizer_step as adam
from ampwise.train.scaler.grad_stats import CheckedGradients, GpuStats, GradStats, StepDecision
from ampwise.train.scaler.gradients import collect_gradients

from ...for_each import for_each

# Triton's interpreter computes with numpy, which warns where a GPU would not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled, not interpreted"),
]


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (1500, 3, 1024)]


def verdict(grad_scale=1024.0, found_inf=0.0):
    return torch.tensor([1.0, found_inf, 1.0, grad_scale, 1.0 - found_inf])


class LeftToTorch(Exception):
    pass


def stepped_by_us(optimizer, numbers):
    """Take a step within torch's; False if torch's own method was asked for a group, or was never replaced."""

    def refuse(*args):
        raise LeftToTorch

    gradients = collect_gradients(optimizer)
    if not len(gradients):
        return False
    part = GpuStats(list(range(len(gradients))), gradients.values, None, False)
    look = CheckedGradients(gradients, GradStats(gradients, [part]), StepDecision(numbers), max_norm=1.0)
    with mock.patch.object(type(optimizer), "_init_group", refuse):
        init_group = adam.faster_adam(optimizer, look)
        if init_group is None:
            return False
        optimizer._init_group = init_group
        try:
            optimizer.step()
        except LeftToTorch:
            return False
        finally:
            del optimizer._init_group
    return True


@pytest.mark.half_by_day
@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True, "weight_decay": 0.0}, {"betas": (0.0, 0.5), "eps": 1e-3}],
    ids=str,
)
def test_ours_is_torchs_adam(optimizer_type, options):
    ours, oracle = parameters(torch.float32), parameters(torch.float64)
    one, other = (optimizer_type(params, lr=0.01, **options) for params in (ours, oracle))
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for parameter, right in zip(ours, oracle, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            right.grad = parameter.grad.double()
            if step:
                parameter.grad *= 1024.0
        bad = step == 3
        if step:
            versions = [parameter._version for parameter in ours]
            assert stepped_by_us(one, verdict(found_inf=float(bad)))
            assert all(parameter._version > before for parameter, before in zip(ours, versions, strict=True))
        else:
            one.step()  # which makes the state
        if not bad:
            other.step()
        for parameter, right in zip(ours, oracle, strict=True):
            torch.testing.assert_close(parameter.double(), right, rtol=2e-6, atol=2e-7)
            if not bad:
                torch.testing.assert_close(parameter.grad.double(), right.grad, rtol=1e-6, atol=0)
            state, expected = one.state[parameter], other.state[right]
            assert state["step"] == expected["step"]
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name].double(), expected[name], rtol=2e-6, atol=2e-7)


def started(**options):
    params = parameters(torch.float32)
    optimizer = torch.optim.AdamW(params, **options)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, params


def test_a_skipped_step_writes_nothing():
    optimizer, params = started()
    before = [tensor.clone() for p in params for tensor in (p, p.grad, *optimizer.state[p].values())]
    assert stepped_by_us(optimizer, verdict(found_inf=1.0))
    after = [tensor for p in params for tensor in (p, p.grad, *optimizer.state[p].values())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_learning_rate_on_the_device():
    optimizer, params = started(lr=torch.tensor(0.5), capturable=False)
    twin, same = started(lr=0.5)
    for each in (optimizer, twin):
        assert stepped_by_us(each, verdict(1.0))
    assert all(torch.equal(one, other) for one, other in zip(params, same, strict=True))


def test_state_that_was_replaced_is_found_again():
    optimizer, params = started()
    assert stepped_by_us(optimizer, verdict(1.0))
    saved = optimizer.state_dict()
    saved["state"] = {
        key: {name: value.clone() for name, value in each.items()} for key, each in saved["state"].items()
    }
    optimizer.load_state_dict(saved)
    assert stepped_by_us(optimizer, verdict(1.0))
    assert optimizer.state[params[0]]["step"] == 3


@for_each(
    "spoil",
    [
        lambda optimizer, params: optimizer.param_groups[0].update(amsgrad=True),
        lambda optimizer, params: optimizer.param_groups[0].update(betas=(torch.tensor(0.9), 0.99)),
        lambda optimizer, params: optimizer.param_groups[0].update(lr=torch.tensor(0.1, dtype=torch.float64)),
        lambda optimizer, params: optimizer.state[params[1]].clear(),
        lambda optimizer, params: [setattr(parameter, "grad", None) for parameter in params],
        lambda optimizer, params: setattr(params[0], "grad", torch.ones(3000)[::2]),
        lambda optimizer, params: setattr(params[0], "grad", torch.ones(1501)[1:]),
        lambda optimizer, params: optimizer.state[params[0]].update(exp_avg=torch.zeros(1500).bfloat16()),
        lambda optimizer, params: optimizer.state[params[0]].update(step=torch.tensor(1.0, dtype=torch.float64)),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_torch(spoil):
    optimizer, params = started()
    spoil(optimizer, params)
    assert not stepped_by_us(optimizer, verdict())


def test_gradients_that_a_hook_has_replaced_are_left_to_torch():
    optimizer, params = started()
    optimizer.register_step_pre_hook(lambda *_: setattr(params[0], "grad", torch.zeros_like(params[0])))
    assert not stepped_by_us(optimizer, verdict())
